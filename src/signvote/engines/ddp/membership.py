"""How a worker gets from one view to the next: found, regroup, join. See `members.py`.

found     all peers are there: the first of them writes view 1 on all, then publishes it
regroup   an exchange failed, or somebody knocked: the members that stopped agree on the next view
join      a worker outside the view knocks at all doors until it finds itself in a view
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Mapping
from typing import Any

from signvote.engines.ddp.agreement import (
    BLANK,
    Answers,
    Change,
    Decided,
    Read,
    Refusal,
    Requests,
    is_majority,
    propose,
)
from signvote.engines.ddp.members import KEYS, KNOCK, Clock, Members, Person, Seen, View
from signvote.engines.ddp.registers import Refused, Registers, ask_all, serve
from signvote.errors import EngineError

log = logging.getLogger("signvote")

FREE = "free"
POLL = 0.05  # seconds between two looks at the others
ASKED = 4  # times that a worker is asked before it counts as silent
TURN = 1.0  # seconds after which the next worker proposes, if the one before it did not


class Membership:
    """This worker among the others.

    Args:
        settings: of the worker.
        facts: texts that all workers must share, by their names.

    """

    def __init__(self, settings: Members, facts: Mapping[str, str]) -> None:
        self.settings = settings
        self.worker = settings.worker_id
        self.me = Person.new(settings.address)
        self.view = View()
        self.registers = Registers()
        self.facts = dict(facts)
        self._known = {w: Person.new(each) for w, each in settings.by_worker.items()}  # boots do not matter
        self.has_joined = False  # whether this process was let in
        self._ballot = 0  # the largest number seen or used
        self._end: Callable[[], None] | None = None

    # ---- to enter --------------------------------------------------------------------------------

    def enter(self) -> None:
        """Listen, and become a member: of the first view, or of one that there is."""
        values = (self.me.boot, None, None, FREE, self.facts)
        for key, value in zip(KEYS, values, strict=True):
            self.registers.put(key, value)
        self._end = serve(self.registers, self.me.address)
        clock = Clock()
        while not self.view.epoch:
            seen = self._look(self._known)
            newest = _newest(seen)
            if newest.epoch:
                self._enter_view(newest, seen)
            else:
                self._found(seen)
            if clock.seconds > self.settings.patience:
                self.close()
                raise EngineError(self._nobody_came(seen))
            if not self.view.epoch:
                time.sleep(POLL)

    def _enter_view(self, newest: View, seen: Mapping[int, Seen]) -> None:
        """Adopt a view that was founded with this process, or ask to be let in."""
        self._compare(seen)
        if not newest.has(self.worker, self.me):
            self.join()
            return
        wanted = newest.to_json()
        if newest.epoch > 1 or self.registers.change("founding", wanted, "adopted") == "adopted":
            self._adopt(newest)

    def _found(self, seen: Mapping[int, Seen]) -> None:
        """Do this worker's part of making the first view; the first peer leads."""
        peers = self.settings.by_worker
        if len(seen) < len(peers) - 1 or self.worker not in peers:
            return
        self._compare(seen)
        leader = min(peers)
        if self.worker != leader or any(each.facts != self.facts for each in seen.values()):
            return
        members = {self.worker: self.me}
        for worker, each in seen.items():
            members[worker] = self._known[worker]._replace(boot=each.boot)
        view = View(1, dict(sorted(members.items())))
        if self._all_adopt(view, seen):
            self._adopt(view)

    def _all_adopt(self, view: View, seen: Mapping[int, Seen]) -> bool:
        """Write the first view on all others. Whether each of them adopts it now."""
        wanted = view.to_json()
        requests = {}
        for worker, each in seen.items():
            if each.founding != "adopted":
                change = {"change": "founding", "from": each.founding, "to": wanted}
                requests[worker] = (view.members[worker].address, change)
        answers, _ = ask_all(requests, self.settings.answer)
        return all(answers.get(worker) == wanted for worker in seen)

    def _compare(self, seen: Mapping[int, Seen]) -> None:
        """Raise if this worker differs from the first of the others in what all must share."""
        first = min(seen, default=self.worker)
        if first > self.worker and not any(each.view.epoch for each in seen.values()):
            return  # the others follow this one
        theirs = seen[first].facts if first in seen else self.facts
        differing = []
        for name, text in self.facts.items():
            if theirs.get(name, text) != text:
                differing.append(name)
        if differing:
            self.close()
            names = ", ".join(differing)
            raise EngineError(f"worker {self.worker} differs from worker {first} in: {names}")

    def _nobody_came(self, seen: Mapping[int, Seen]) -> str:
        peers = self.settings.by_worker
        here = {*seen, self.worker}
        missing = [str(worker) for worker in peers if worker not in here]
        names = ", ".join(missing) or "nobody"
        return (
            f"worker {self.worker} waited {self.settings.patience:g} s; missing: {names}. The first round needs all"
            f" {len(peers)} peers; if some of them had started already, start all of them again"
        )

    def join(self) -> None:
        """Knock at all doors until a view has this process."""
        clock = Clock()
        self.has_joined = True
        log.warning("signvote: worker %d is outside, and knocks at the others' doors", self.worker)
        while True:
            seen = self._look(self._known)
            newest = _newest(seen)
            if newest.epoch > self.view.epoch and newest.has(self.worker, self.me):
                self._adopt(newest)
                return
            if clock.seconds > self.settings.patience:
                raise EngineError(
                    f"worker {self.worker} is outside view {newest.epoch}, and nobody let it in for"
                    f" {self.settings.patience:g} s; {len(seen)} of {len(newest.members)} members answered"
                )
            self._knock(seen)
            time.sleep(2 * POLL)

    def _knock(self, workers: Collection[int]) -> None:
        """Ask others to let this process in."""
        knock = {"tell": f"{KNOCK}{self.worker}", "value": list(self.me)}
        requests = {}
        for worker in workers:
            if worker != self.worker:
                requests[worker] = (self._known[worker].address, knock)
        ask_all(requests, self.settings.answer)

    # ---- to go on --------------------------------------------------------------------------------

    @property
    def knocks(self) -> dict[int, Person]:
        """The processes that want to be let in."""
        found = {}
        for key, value in self.registers.told().items():
            worker = int(key.removeprefix(KNOCK))
            person = Person(*value)
            if not self.view.has(worker, person):
                found[worker] = person
        return found

    def regroup(self, patience: float | None = None) -> None:
        """Stop in this view, and return in a later one.

        Args:
            patience: seconds to look for a majority; None: as set.

        """
        patience = self.settings.patience if patience is None else patience
        clock = Clock()
        since: Clock | None = None  # when a proposal became possible
        while True:
            self._be_ready()
            seen, silent = self._asked(self.view.members, self.settings.answer / ASKED)
            newest = _newest(seen)
            if newest.epoch > self.view.epoch:
                self._follow(newest)
                return
            ready = self._ready(seen)
            can_decide = is_majority(ready, self.view.members)
            if can_decide and not self._may_come(ready, seen, silent, clock):
                since = since or Clock()
                my_turn = TURN * ready.index(self.worker)
                if since.seconds >= my_turn:
                    proposed = self._next(ready, seen)
                    decided = self._propose(proposed, seen)
                    if decided is not None:
                        self._follow(decided)
                        return
            if clock.seconds > patience:
                raise EngineError(self._minority(seen, clock.seconds))
            time.sleep(POLL)

    def _may_come(
        self,
        ready: list[int],
        seen: Mapping[int, Seen],
        silent: Collection[int],
        clock: Clock,
    ) -> bool:
        """Whether to wait for other members: those that compute, and for a while those that give no answer."""
        computing = []
        for worker, each in seen.items():
            if worker not in ready and self._is_member(worker, each):
                computing.append(worker)
        if computing and clock.seconds < self.settings.timeout:
            return True
        return bool(silent) and clock.seconds < self.settings.answer

    def _is_member(self, worker: int, seen: Seen) -> bool:
        """Whether this is the process that is in the view, not one that was started after it."""
        return seen.boot == self.view.members[worker].boot

    def _be_ready(self) -> None:
        """Publish that this worker votes no more in this view, and who knocked at its door."""
        knocks = {str(worker): list(person) for worker, person in self.knocks.items()}
        self.registers.put("ready", {"epoch": self.view.epoch + 1, "knocks": knocks})

    def _ready(self, seen: Mapping[int, Seen]) -> list[int]:
        """The members that have stopped in this view, this worker among them."""
        wanted = self.view.epoch + 1
        found = [self.worker]
        for worker, each in seen.items():
            epoch = (each.ready or {}).get("epoch")
            if epoch == wanted and self._is_member(worker, each):
                found.append(worker)
        return sorted(found)

    def _next(self, ready: list[int], seen: Mapping[int, Seen]) -> View:
        """The view to propose: those that are ready, and those that knocked and answer."""
        knocks = dict(self.knocks)
        for worker in ready:
            if worker == self.worker:
                continue
            given = (seen[worker].ready or {})["knocks"]
            for who, person in given.items():
                knocks[int(who)] = Person(*person)
        strangers = {worker: person for worker, person in knocks.items() if worker not in ready}
        alive = self._look(strangers)
        members = {worker: self.view.members[worker] for worker in ready}
        for worker, person in strangers.items():
            if worker in alive and alive[worker].boot == person.boot:
                members[worker] = person
        return View(self.view.epoch + 1, dict(sorted(members.items())))

    def _propose(self, view: View, seen: Mapping[int, Seen]) -> View | None:
        """Propose the next view to the members that answer; None: nothing is decided."""
        self._ballot += 1
        members = self.view.members
        steps = propose(list(members), (self._ballot, self.worker), view.to_json())
        answers: Answers = {}
        requests: Requests = next(steps)
        reached = {*seen, self.worker}
        while True:
            asked = {worker: request for worker, request in requests.items() if worker in reached}
            answers = self._answers(asked)
            try:
                requests = steps.send(answers)
            except StopIteration as end:
                result: Decided | Refusal = end.value
                break
        if isinstance(result, Decided):
            return View.of(result.value)
        self._ballot = max(self._ballot, result.largest)
        return None

    def _answers(self, requests: Requests) -> Answers:
        """Ask members about their slips."""
        found: dict[int, Any] = {}
        sent = {}
        for worker, request in requests.items():
            person = self.view.members[worker]
            key = self._slip(person, self.view.epoch)
            if worker == self.worker:
                found[worker] = _locally(self.registers, key, request)
            else:
                sent[worker] = (person.address, _on_the_wire(key, request))
        answers, _ = ask_all(sent, self.settings.answer)
        for worker, answer in answers.items():
            was_read = isinstance(requests[worker], Read)
            found[worker] = answer[0] if was_read else answer
        return found

    def _slip(self, person: Person, epoch: int) -> str:
        """The name of the slip by which a member takes part in deciding what follows an epoch."""
        return f"slip/{person.boot}/{epoch}"

    def _follow(self, view: View) -> None:
        """Adopt a later view, or ask to be let in again."""
        self._know(view)
        if view.has(self.worker, self.me):
            self._adopt(view)
        else:
            self.join()

    def _adopt(self, view: View) -> None:
        """Be a member of a view that is decided, and tell everybody that asks."""
        self._know(view)
        for worker in view.members:
            self.registers.drop(f"{KNOCK}{worker}")
        self.registers.drop("slip/")  # of epochs that are over
        self.registers.drop("group/")
        self.registers.put(self._slip(self.me, view.epoch), BLANK)
        self.view = view
        self._ballot = 0
        self.registers.put("ready", None)
        self.registers.put("view", view.to_json())

    def _know(self, view: View) -> None:
        self._known |= view.members

    def _look(self, people: Mapping[int, Person]) -> dict[int, Seen]:
        """What others show; those that give no answer are left out."""
        return self._asked(people, self.settings.answer)[0]

    def _asked(self, people: Mapping[int, Person], within: float) -> tuple[dict[int, Seen], set[int]]:
        """What others show, and who is silent. Where nobody listens the process is gone, and that is an answer."""
        request = {"read": list(KEYS)}
        others = {}
        for worker, person in people.items():
            if worker != self.worker:
                others[worker] = (person.address, request)
        answers, failures = ask_all(others, within)
        silent = {worker for worker, error in failures.items() if not isinstance(error, Refused)}
        seen = {worker: Seen.of(values) for worker, values in answers.items()}
        return seen, silent

    def _minority(self, seen: Mapping[int, Seen], seconds: float) -> str:
        members = self.view.members
        reached = sorted({*seen, self.worker})
        names = ", ".join(map(str, reached))
        return (
            f"worker {self.worker} reaches {len(reached)} of {len(members)} members (worker {names}), and looked for a"
            f" majority for {seconds:.0f} s. A minority does not continue: start this worker again when the others can"
            " be reached; if half of them are lost for good, start all from a checkpoint"
        )

    def close(self) -> None:
        """Listen no more."""
        if self._end is not None:
            self._end()
            self._end = None


def _newest(seen: Mapping[int, Seen]) -> View:
    """The latest view that anybody shows."""
    views = [each.view for each in seen.values()]
    return max(views, key=lambda view: view.epoch, default=View())


def _on_the_wire(key: str, request: Read | Change) -> dict[str, Any]:
    if isinstance(request, Read):
        return {"read": [key]}
    return {
        "change": key,
        "from": request.expected,
        "to": request.desired,
    }


def _locally(registers: Registers, key: str, request: Read | Change) -> Any:
    if isinstance(request, Read):
        return registers.get(key)
    return registers.change(key, request.expected, request.desired)
