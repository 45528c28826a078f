"""A Flower Grid in one process: messages are taken apart and put together again as Flower does on the wire.

For tests and for measuring: what strategies and ClientApps compute does not depend on who moves the bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import count
from typing import Any

from flwr.app import Context, Error, Message, RecordDict
from flwr.serverapp import Grid
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, no_object_id_recompute
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents
from flwr.supercore.task_identity import TaskIdentity

SUPERLINK = 1  # its node id

Client = Callable[[Message, Context], Message]


def transport(message: Message) -> tuple[Message, int]:
    """The message as it arrives, and the bytes that travelled."""
    with no_object_id_recompute():
        name = message.object_id
        objects = {key: thing.deflate() for key, thing in get_all_nested_objects(message).items()}
    size = sum(map(len, objects.values()))
    arrived = inflate_object_from_contents(name, objects)  # empties `objects`
    assert isinstance(arrived, Message)
    arrived.metadata.__dict__["_message_id"] = name
    return arrived, size


class LocalGrid(Grid):
    """Nodes are functions; one that raises answers with an error, one that is not `online` not at all."""

    def __init__(self, clients: dict[int, Client], config: dict[int, dict[str, Any]] | None = None) -> None:
        TaskIdentity.run_id = TaskIdentity.node_id = TaskIdentity.task_id = 1  # the server's
        self.clients, self.online = clients, set(clients)
        self.sent: dict[str, Message] = {}  # not answered yet, by id
        self.numbers = count(1)
        self.bytes_down: list[int] = []  # by message
        self.bytes_up: list[int] = []
        self.contexts = {n: self.fresh(n, (config or {}).get(n, {})) for n in clients}

    def fresh(self, node: int, config: dict[str, Any]) -> Context:
        """The context of a node that has just been started."""
        return Context(run_id=1, node_id=node, node_config=config, state=RecordDict(), run_config={})

    def set_run(self, run: Any) -> None:
        """Nothing to do."""

    @property
    def run(self) -> Any:
        """There is none."""

    def create_message(self, *args: Any, **kwargs: Any) -> Message:
        """Flower's strategies do not use it."""
        raise NotImplementedError

    def get_node_ids(self) -> Iterable[int]:
        """Those online."""
        return self.online

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Take messages apart, and put them together again."""
        names = []
        for message in messages:
            arrived, size = transport(message)
            self.bytes_down.append(size)
            name = f"message {next(self.numbers)}"
            arrived.metadata.__dict__["_message_id"] = name
            arrived.metadata.__dict__["_dst_node_id"] = message.metadata.dst_node_id
            self.sent[name] = arrived
            names.append(name)
        return names

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """The replies to these messages, in the order in which they were sent: one node answers after the other."""
        wanted = set(message_ids)
        return [self.reply(self.sent.pop(name)) for name in list(self.sent) if name in wanted]

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        """All replies."""
        return self.pull_messages(self.push_messages(messages))

    def reply(self, message: Message) -> Message:
        """The reply of a node; that of the SuperLink for a node that does not answer."""
        node = message.metadata.dst_node_id
        reply = self.answer(node, message)
        if reply is None:
            reply, node = Message(Error(3, "no answer in time"), reply_to=message), SUPERLINK
        back, size = transport(reply) if reply.has_content() else (reply, 0)
        self.bytes_up.append(size)
        back.metadata.__dict__["_src_node_id"] = node
        return back

    def answer(self, node: int, message: Message) -> Message | None:
        """What a node replies, or nothing."""
        if node not in self.online:
            return None
        try:
            return self.clients[node](message, self.contexts[node])
        except Exception as error:
            return Message(Error(0, repr(error)), reply_to=message)
