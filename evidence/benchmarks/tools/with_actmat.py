"""actmat of this tree."""

INSTALL: tuple[str, ...] = ()
DISTRIBUTION = "actmat"
OPTIONS = {
    "average": {},
    "task_arithmetic": {"scaling": 0.4},
    "ties": {"density": 0.2, "variant": "mergekit"},
    "dare": {"density": 0.5, "rule": "task_arithmetic", "scaling": 0.4},
    "slerp": {"t": 0.5},
}
METHODS = tuple(OPTIONS)


def merge(method: str, base: str, experts: list[str], out: str, dtype: str) -> None:
    """An adapter from adapters, else a model."""
    from actmat.api.merging import merge as run

    adapters = "lora" in experts[0]
    given = {"base": None if adapters else base, "experts": experts, "method": method, "options": OPTIONS[method]}
    run(**given, out=out, **({} if adapters else {"scope": "all", "dtype": dtype}))
