"""A stand-in for the techniques of a plan, in runs that use none: it does nothing, and all its figures are zero."""


class NoTechniques:
    def start_backward(self) -> None: ...
    def end_step(self) -> None: ...
    def held_bytes(self) -> dict[str, int]:
        return {}

    def peak_bytes(self) -> dict[str, int]:
        return {}

    def allocator_retries(self) -> int:
        return 0

    def moved_bytes(self) -> dict[str, int]:
        return {}

    def waited_seconds(self) -> float:
        return 0.0

    def busy_seconds(self) -> dict[str, float]:
        return {}
