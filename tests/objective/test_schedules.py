import pytest
from pydantic import ValidationError

from hybrid.objective.schedules import Schedule, at, linear_floor


@pytest.mark.parametrize(
    ("shape", "values"), [("linear", [1.0, 0.75, 0.5, 0.0, 0.0]), ("cosine", [1.0, 0.853553390593, 0.5, 0.0, 0.0])]
)
def test_schedule(shape, values):
    schedule = Schedule(start=1.0, end=0.0, steps=100, shape=shape)
    assert [schedule.at(k) for k in (0, 25, 50, 100, 999)] == pytest.approx(values)


def test_numbers_schedules_and_functions():
    assert at(0.5, 7) == 0.5
    assert at(Schedule(start=0, end=7, steps=7), 3) == pytest.approx(3)
    assert at(lambda step: 2 * step, 7) == 14
    assert [linear_floor(5e-3, 5e-5, 1e-3, k) for k in (0, 80, 81)] == pytest.approx([5e-3, 1e-3, 1e-3])


@pytest.mark.parametrize("bad", [{"steps": 0}, {"start": float("nan")}, {"shape": "square"}])
def test_refused_schedules(bad):
    with pytest.raises(ValidationError):
        Schedule.model_validate({"start": 1.0, "end": 0.0, "steps": 10} | bad)
