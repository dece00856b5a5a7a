"""The queue alone, with a receiver that comes and goes."""

import json
import sys
import threading
from dataclasses import asdict

from hypothesis import given
from hypothesis import strategies as st

from hybrid.delivery import Delivery, LostError, Operation, read_buffer


class Receiver:
    """Takes operations while it is there."""

    def __init__(self):
        self.there = True
        self.taken = []
        self.gate = threading.Event()
        self.gate.set()

    def __call__(self, operations):
        self.gate.wait(120)
        if not self.there:
            raise LostError("gone")
        if operations[0].values.get("poison"):
            raise RuntimeError("poison")
        self.taken.append(operations[0].step)
        return 1


def point(step, **values):
    return Operation(kind="metrics", values=values or {"x": 1.0}, step=step)


def test_putting_never_waits_for_the_receiver(tmp_path):
    receiver = Receiver()
    receiver.gate.clear()
    delivery = Delivery(receiver, tmp_path / "b.jsonl", {})
    for step in range(100):
        delivery.put(point(step))
    assert delivery.num_waiting == 100
    receiver.gate.set()
    assert delivery.close() == 0
    assert receiver.taken == list(range(100))


def test_what_waits_survives_a_crash_and_goes_out_first(tmp_path):
    gone = Receiver()
    gone.there = False
    crashed = Delivery(gone, tmp_path / "b.jsonl", {"run": "1"})
    crashed.put(point(0))
    crashed.flush()
    for step in (1, 2):
        crashed.put(point(step))
    with (tmp_path / "b.jsonl").open("a") as file:
        file.write('{"kind": "metr')  # cut off by the crash; never closed
    receiver = Receiver()
    delivery = Delivery(receiver, tmp_path / "b.jsonl", {"run": "1"})
    delivery.put(point(3))
    assert delivery.close() == 0
    assert receiver.taken == [0, 1, 2, 3]
    assert not (tmp_path / "b.jsonl").exists()


def test_the_buffer_is_gone_when_all_that_waited_is_delivered(tmp_path):
    """Also where the closing thread looks between the last delivery and the removal of the file."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for number in range(100):
            buffer = tmp_path / f"{number}.jsonl"
            buffer.write_text(f"{json.dumps({'run': '1'})}\n{json.dumps(asdict(point(0)))}\n")
            assert Delivery(Receiver(), buffer, {"run": "1"}).close() == 0
            assert not buffer.exists()
    finally:
        sys.setswitchinterval(interval)


def test_a_buffer_of_another_run_is_left_alone(tmp_path):
    gone = Receiver()
    gone.there = False
    first = Delivery(gone, tmp_path / "b.jsonl", {"run": "1"})
    first.put(point(0))
    first.close()
    receiver = Receiver()
    assert Delivery(receiver, tmp_path / "b.jsonl", {"run": "2"}).close() == 0
    assert receiver.taken == []
    assert len(read_buffer(tmp_path / "b.jsonl")[1]) == 1


def test_a_lost_receiver_is_tried_again_at_the_next_operation_after_the_wait(tmp_path):
    receiver = Receiver()
    receiver.there = False
    patient = Delivery(receiver, tmp_path / "p.jsonl", {}, retry_after_s=1000.0)
    eager = Delivery(receiver, tmp_path / "e.jsonl", {}, retry_after_s=0.0)
    for delivery in (patient, eager):
        delivery.put(point(0))
        delivery.flush()
    receiver.there = True
    patient.put(point(1))
    assert patient.num_waiting == 2
    eager.put(point(1))
    assert eager.close() == 0
    assert receiver.taken == [0, 1]
    assert patient.close() == 0


def test_a_disk_that_takes_nothing_costs_nothing_while_the_process_lives(tmp_path):
    receiver, buffer = Receiver(), tmp_path / "missing" / "b.jsonl"
    receiver.there = False
    delivery = Delivery(receiver, buffer, {}, retry_after_s=1000.0)
    for step in (0, 1):
        delivery.put(point(step))
        delivery.flush()
    buffer.parent.mkdir()
    delivery.put(point(2))
    assert [operation.step for operation in read_buffer(buffer)[1]] == [0, 1, 2]
    receiver.there = True
    assert delivery.close() == 0
    assert receiver.taken == [0, 1, 2]


def test_a_flush_is_not_judged_by_an_attempt_from_before(tmp_path):
    tried = []

    def send(operations):
        tried.append(operations[0].step)
        if len(tried) == 1:
            begun.set()
            go_on.wait(120)
            raise LostError("gone")
        return 1

    begun, go_on = threading.Event(), threading.Event()
    delivery = Delivery(send, tmp_path / "b.jsonl", {}, retry_after_s=1000.0)
    delivery.put(point(0))
    assert begun.wait(120)
    later = threading.Timer(0.2, go_on.set)  # when the flush waits
    later.start()
    assert delivery.flush()
    later.join()
    assert tried == [0, 0]
    assert delivery.close() == 0
    assert delivery.flush(), "nothing waits after the end"


def test_a_flush_after_the_end_does_not_wait_for_what_nobody_sends(tmp_path):
    receiver = Receiver()
    receiver.there = False
    delivery = Delivery(receiver, tmp_path / "b.jsonl", {})
    delivery.put(point(0))
    assert delivery.close() == 1
    assert not delivery.flush(1e6)


def test_what_a_receiver_that_hangs_has_not_taken_in_time_is_on_disk_until_it_has(tmp_path):
    receiver, buffer = Receiver(), tmp_path / "b.jsonl"
    receiver.gate.clear()
    delivery = Delivery(receiver, buffer, {})
    for step in (0, 1):
        delivery.put(point(step))
    assert delivery.close(timeout_s=0.1) == 2
    assert [operation.step for operation in read_buffer(buffer)[1]] == [0, 1]
    receiver.gate.set()
    assert delivery.flush(120.0)
    assert receiver.taken == [0, 1]
    assert not buffer.exists()


def test_what_is_put_while_a_lost_receiver_is_tried_again_is_on_disk(tmp_path):
    receiver, buffer = Receiver(), tmp_path / "b.jsonl"
    receiver.there = False
    delivery = Delivery(receiver, buffer, {}, retry_after_s=0.0)
    delivery.put(point(0))
    delivery.flush()
    receiver.gate.clear()
    for step in (1, 2):  # the first of them starts an attempt
        delivery.put(point(step))
    assert [operation.step for operation in read_buffer(buffer)[1]] == [0, 1, 2]
    receiver.there = True
    receiver.gate.set()
    assert delivery.close() == 0
    assert receiver.taken == [0, 1, 2]
    assert not buffer.exists()


def test_a_line_that_a_crash_cut_off_spoils_none_that_comes_behind_it(tmp_path):
    gone, buffer = Receiver(), tmp_path / "b.jsonl"
    gone.there = False
    first = Delivery(gone, buffer, {"run": "1"})
    first.put(point(0))
    first.close()
    with buffer.open("a") as file:
        file.write('{"kind": "metr')
    gone.gate.clear()
    again = Delivery(gone, buffer, {"run": "1"})
    again.put(point(1))
    assert [operation.step for operation in read_buffer(buffer)[1]] == [0, 1]
    gone.gate.set()
    assert again.close() == 2


def test_a_refused_record_does_not_wait_on_disk_for_ever(tmp_path):
    buffer = tmp_path / "b.jsonl"
    buffer.write_text(f"{json.dumps({})}\n{json.dumps(asdict(point(0, poison=True)))}\n")
    delivery = Delivery(Receiver(), buffer, {})
    assert delivery.close() == 0
    assert delivery.num_refused == 1
    assert not buffer.exists()


@given(st.lists(st.sampled_from(["good", "poison", "lose", "return"]), max_size=12))
def test_order_holds_and_nothing_is_lost_whatever_happens(tmp_path_factory, events):
    folder = tmp_path_factory.mktemp("delivery")
    receiver = Receiver()
    delivery = Delivery(receiver, folder / "b.jsonl", {}, retry_after_s=0.0)
    for step, event in enumerate(events):
        match event:
            case "good":
                delivery.put(point(step))
            case "poison":
                delivery.put(point(step, poison=True))
            case _:
                delivery.flush()
                receiver.there = event == "return"
    receiver.there = True
    assert delivery.close() == 0
    assert receiver.taken == [step for step, event in enumerate(events) if event == "good"]
    assert delivery.num_refused == events.count("poison")
