"""What the words of a search are for Optuna."""

from typing import TYPE_CHECKING, Any

from hydra.core.override_parser.types import Override, Transformer

from project.errors import UserError

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution


def distribution(override: Override) -> "BaseDistribution":
    """What the values of a word are for Optuna, as the plugin reads them.

    choice(a, b) and a,b are categories; range(1, 8, step=2) are numbers from 1 to 8 (both may be
    taken); interval(0.1, 1) is any number in it, an integer with tag(int, ...); tag(log, ...)
    takes its logarithm. shuffle(...) makes categories.

    Raises:
        UserError: a range or an interval is empty, or starts where it has no logarithm.
    """
    from optuna.distributions import (
        CategoricalDistribution,
        FloatDistribution,
        IntDistribution,
    )

    sweep: Any = override.value()
    tags = getattr(sweep, "tags", set())
    is_log = "log" in tags
    try:
        if unknown := tags - {"log", "int"}:
            raise ValueError(f"the tags are log and int, not {', '.join(sorted(unknown))}")
        if override.is_interval_sweep():
            if "int" in tags:
                return IntDistribution(int(sweep.start), int(sweep.end), log=is_log)
            return FloatDistribution(sweep.start, sweep.end, log=is_log)
        if override.is_range_sweep() and not sweep.shuffle:
            numbers = sweep.start, sweep.stop, sweep.step
            if all(isinstance(number, int) for number in numbers):
                return IntDistribution(sweep.start, sweep.stop, step=sweep.step, log=is_log)
            return FloatDistribution(sweep.start, sweep.stop, step=sweep.step, log=is_log)
        choices: list[Any] = [*override.sweep_iterator(Transformer.encode)]
        return CategoricalDistribution(choices)
    except (ValueError, TypeError) as error:
        raise UserError(f"{override.input_line}: {error}") from None
