"""What a study or a benchmark refuses, and how it ends then."""

from __future__ import annotations

from argparse import ArgumentTypeError

import pytest

from studies.command_line import existing_device, positive, run


@pytest.mark.parametrize("text", ["0", "-1", "1.5", "many", ""])
def test_a_number_of_things_is_at_least_one(text: str) -> None:
    assert positive("12") == 12
    with pytest.raises(ArgumentTypeError, match="allowed is a whole number at least 1"):
        positive(text)


@pytest.mark.parametrize("text", ["tpu", "cuda:99", "meta"])
def test_a_device_is_one_of_this_machine(text: str) -> None:
    assert existing_device("cpu") == "cpu"
    assert existing_device("auto") in ("cpu", "cuda")
    with pytest.raises(ArgumentTypeError, match=f"device is '{text}'"):
        existing_device(text)


def test_bad_input_is_one_sentence_and_exit_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    def bad() -> None:
        raise ValueError("no such\n  thing; give another")

    with pytest.raises(SystemExit) as ended:
        run(bad)
    assert ended.value.code == 2
    assert capsys.readouterr().err == "no such thing; give another\n"
