"""The time of `import gradflow` compared with `import diffrax`, which it depends on.

Every import runs in a fresh interpreter. The two take turns, and the shortest time of
each counts. Packages that are slow to import and not needed at once must not be loaded
by `import gradflow`, unless diffrax itself loads them.
"""

import argparse
import json
import subprocess
import sys

from _timing import duration, footer, interleaved, table, undisturbed, verdict

TARGET = 1.3
LATER = ("matplotlib", "xarray", "scipy", "scipy.integrate", "tqdm", "optax")
"""Packages to import only on first use."""


def _python(code: str) -> str:
    command = [sys.executable, "-c", code]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def seconds_to_import(package: str) -> float:
    return float(
        _python(
            f"import time; t = time.perf_counter(); import {package}; "
            "print(time.perf_counter() - t)"
        )
    )


def loaded_by(package: str) -> set[str]:
    code = f"import json, sys, {package}; print(json.dumps(list(sys.modules)))"
    return set(json.loads(_python(code)))


def packages_of(modules: set[str]) -> set[str]:
    return {name.partition(".")[0] for name in modules}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=11)
    options = parser.parse_args()
    names = ("diffrax", "gradflow")
    seconds = interleaved(
        {name: lambda name=name: [seconds_to_import(name)] for name in names},
        options.rounds,
    )
    diffrax, gradflow = (undisturbed(seconds[name]) for name in names)
    rows = [
        ("import diffrax", duration(diffrax), ""),
        ("import gradflow", duration(gradflow), f"{gradflow / diffrax:.2f}"),
    ]
    print(table(("", "time", "ratio"), rows))
    print(
        f"\n{verdict(gradflow / diffrax, TARGET)} (shortest of {options.rounds} each)\n"
    )

    modules = {name: loaded_by(name) for name in ("jax", *names)}
    print(
        table(
            ("loaded by importing", *modules),
            [
                (name, *("yes" if name in m else "no" for m in modules.values()))
                for name in LATER
            ],
        )
    )
    more = modules["gradflow"] - modules["diffrax"]
    early = [name for name in LATER if name in more]
    print(f"\nLoaded too early, in addition to diffrax: {', '.join(early) or 'none'}")
    public = packages_of(more) - packages_of(modules["diffrax"])
    print(f"All packages in addition to diffrax: {', '.join(sorted(public))}")
    scipy = sorted(
        name
        for name in modules["jax"]
        if name.startswith("scipy.") and name.count(".") == 1 and "._" not in name
    )
    print(f"Parts of scipy that jax itself loads: {', '.join(scipy) or 'none'}")
    beyond = sorted(n for n in more if n.startswith("scipy") and "._" not in n)
    print(f"Parts of scipy that gradflow adds: {', '.join(beyond) or 'none'}")
    print(footer("gradflow", "diffrax", "jax", "scipy"))


if __name__ == "__main__":
    main()
