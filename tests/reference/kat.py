"""KAT (methods_core 5.2), with loops: a literal reading of the trigger, one token at a time."""

from collections.abc import Sequence

from tests.reference.rows import Numbers


def windows(d: Sequence[float], window: int, stride: int = 1) -> list[tuple[int, float]]:
    """(end, mean) of each window, 0-based."""
    return [
        (end, sum(d[end - window + 1 : end + 1]) / window)
        for end in range(window - 1, len(d))
        if (end - window + 1) % stride == 0
    ]


def minimum(d: Sequence[float], window: int, stride: int = 1) -> float | None:
    return min((z for _, z in windows(d, window, stride)), default=None)


def cut(
    d: Sequence[float],
    *,
    threshold: float,
    window: int,
    patience: int,
    n_exempt: int = 0,
    stride: int = 1,
    min_keep: int = 1,
    exempt_trigger: str = "ignored",
) -> int:
    """Tokens to keep."""
    counter, e0 = 0, 0
    for end, z in windows(d, window, stride):
        if not z < threshold:
            counter = 0
            continue
        if counter == 0:
            e0 = end
        counter += 1
        if counter < patience:
            continue
        where = e0 - window + 1
        if where >= n_exempt:
            return min(len(d), max(where, min_keep))
        if exempt_trigger == "deferred" and end >= n_exempt:
            return min(len(d), max(n_exempt, min_keep))
    return len(d)


def remember(memory: Sequence[float], responses: Sequence[Numbers], *, window: int, buffer: int) -> list[float]:
    """The first-in-first-out memory after these responses."""
    out = list(memory)
    for d in responses:
        m = minimum(d, window)
        if m is not None:
            out.append(m)
            if len(out) > buffer:
                out.pop(0)
    return out
