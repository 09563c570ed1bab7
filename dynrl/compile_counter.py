"""Counts compilations (law 3). JAX reports every backend compilation, persistent-cache hits included."""

import jax

_EVENT = "/jax/core/compile/backend_compile_duration"
_compiled: list[tuple[str, float]] = []
_listening = False


def _listen(event: str, duration_secs: float, **kwargs: object) -> None:
    if event == _EVENT:
        _compiled.append((str(kwargs.get("fun_name", "?")), duration_secs))


class CompileCounter:
    """Compilations of this process since `start`."""

    def __init__(self) -> None:
        global _listening
        if not _listening:
            jax.monitoring.register_event_duration_secs_listener(_listen)
            _listening = True
        self.start()

    def start(self) -> None:
        """Counts from here."""
        self._first = len(_compiled)

    @property
    def count(self) -> int:
        """Programs compiled since `start`."""
        return len(_compiled) - self._first

    @property
    def secs(self) -> float:
        """Seconds spent on them."""
        return sum(secs for _, secs in _compiled[self._first :])

    @property
    def names(self) -> list[str]:
        """Their names, where JAX tells."""
        return [name for name, _ in _compiled[self._first :]]
