"""An attack study: which rule withstands what, on MNIST's bundled images, as a table and a page.

    python examples/attack_study.py                                    # a minute or two
    python examples/attack_study.py --rounds 5 --rules robust # the small form

Rules x attacks, a run each, in as many processes as there are cores. Ctrl-C keeps what is done, the same command goes
on. Five of fifteen workers attack: `invert` sends the opposite, `anti` the opposite of the honest majority, a `sleeper`
is honest until a third of the rounds are over and then does as `anti` does. The last column is what counts, the worst.
docs/security.md has the study with three seeds and more attacks; a study of your own can also be a TOML file, see
docs/simulate.md.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from signvote import report
from signvote.sim import Config
from signvote.sim.compare import compare


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rules", nargs="+", default=["majority", "weighted", "robust"])
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--out", type=Path, default=Path("runs/attack-study"))
    options = parser.parse_args()

    attacks = [None, "invert:5", "anti:5", f"sleeper:5:{options.rounds // 3 + 1}"]
    configs = [
        Config(
            task="mnist-10k", model="mlp", rule=rule, attack=attack, batch_sizes=(16,) * 15,
            rounds=options.rounds, step=2e-3,
        )
        for rule in options.rules for attack in attacks
    ]  # fmt: skip
    options.out.mkdir(parents=True, exist_ok=True)
    results = compare(configs, options.out)
    report.write(results, options.out)

    found = {(row["rule"], row["attack"]): row["value"] for row in report.table(results)}
    print(f"{'test accuracy':<14}", *(f"{attack or 'no attack':>12}" for attack in attacks), f"{'worst':>12}")
    for rule in options.rules:
        row = [found[rule, attack] for attack in attacks]
        print(f"{rule:<14}", *(f"{accuracy:>12.1%}" for accuracy in [*row, min(row)]))
    print(f"the page: {options.out / 'report.html'}")


if __name__ == "__main__":
    main()
