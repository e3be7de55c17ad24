from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from training.engine.tensorfile import check_tensors, read_tensors, size_of, write_tensors
from training.errors import TrainingError

STATE = {
    "mask": torch.tensor([True, False, True]),
    "w": torch.arange(6, dtype=torch.float32).reshape(2, 3),
    "bytes": torch.arange(5, dtype=torch.uint8),
    "count": torch.tensor(7),
    "half": torch.tensor([1.5, -2.0], dtype=torch.bfloat16),
    "none": torch.zeros(0, 4),
    "strided": torch.arange(6.0, dtype=torch.float64).reshape(2, 3).T,
}


def same(left, right):
    return left.keys() == right.keys() and all(
        torch.equal(left[name], right[name]) and left[name].dtype == right[name].dtype for name in left
    )


@pytest.mark.parametrize("copy", [True, False])
def test_tensors_and_facts_round_trip_in_order(tmp_path, copy):
    write_tensors(tmp_path / "x", STATE, {"round": 3, "list": [1, None]}, durable=True)
    tensors, facts = read_tensors(tmp_path / "x", copy=copy)
    assert same(tensors, STATE)
    assert list(tensors) == list(STATE)
    assert facts == {"round": 3, "list": [1, None]}


def test_tensor_file_is_compatible_with_safetensors(tmp_path):
    write_tensors(tmp_path / "ours", STATE)
    assert same(load_file(tmp_path / "ours"), STATE)
    save_file({name: tensor.contiguous() for name, tensor in STATE.items()}, tmp_path / "theirs")
    assert same(read_tensors(tmp_path / "theirs")[0], STATE)


def test_writing_a_smaller_state_truncates_the_file(tmp_path):
    write_tensors(tmp_path / "x", {"w": torch.ones(1000)})
    write_tensors(tmp_path / "x", {"w": torch.ones(2)})
    assert same(read_tensors(tmp_path / "x")[0], {"w": torch.ones(2)})
    assert (tmp_path / "x").stat().st_size < 200


def test_copied_tensors_do_not_change_with_the_file(tmp_path):
    write_tensors(tmp_path / "x", {"w": torch.ones(4)})
    copied = read_tensors(tmp_path / "x")[0]
    write_tensors(tmp_path / "x", {"w": torch.zeros(4)})
    assert torch.equal(copied["w"], torch.ones(4))


def test_more_tensors_than_one_write_call_takes_round_trip(tmp_path):
    state = {str(index): torch.full((3,), float(index)) for index in range(1500)}
    write_tensors(tmp_path / "x", state)
    assert same(read_tensors(tmp_path / "x")[0], state)


def test_truncated_tensor_file_is_rejected(tmp_path):
    write_tensors(tmp_path / "x", STATE)
    content = (tmp_path / "x").read_bytes()
    for length in (0, 5, 60, len(content) - 1):
        (tmp_path / "x").write_bytes(content[:length])
        with pytest.raises(TrainingError, match=r"damaged|cut short"):
            read_tensors(tmp_path / "x")


def test_unsupported_tensor_type_is_rejected_by_name(tmp_path):
    with pytest.raises(TrainingError, match=r"'z' has type torch\.complex64"):
        write_tensors(tmp_path / "x", {"z": torch.zeros(2, dtype=torch.complex64)})


def test_size_of_sums_the_bytes_of_the_tensors():
    assert size_of(STATE) == 3 + 6 * 4 + 5 + 8 + 2 * 2 + 0 + 6 * 8


class TestCheckTensors:
    """Files from another machine."""

    def write(self, path, header, padded=True):
        """A file of this header and four bytes."""
        content = header.encode()
        content += b" " * (-len(content) % 8 if padded else 0)
        path.write_bytes(len(content).to_bytes(8, "little") + content + b"\0\0\0\0")

    def test_written_file_passes_and_its_bytes_are_counted(self, tmp_path):
        write_tensors(tmp_path / "x", STATE)
        assert check_tensors(tmp_path / "x") == size_of(STATE)
        write_tensors(tmp_path / "none", {})
        assert check_tensors(tmp_path / "none") == 0

    @pytest.mark.parametrize(
        "header",
        [
            "[]",
            "null",
            '{"w": 3}',
            '{"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}',
            '{"w": {"dtype": "F32", "shape": [-1, -1], "data_offsets": [0, 4]}}',
            '{"w": {"dtype": "F32", "shape": [true], "data_offsets": [0, 4]}}',
            '{"w": {"dtype": "F32", "shape": [1.0], "data_offsets": [0, 4]}}',
            '{"w": {"dtype": "O", "shape": [1], "data_offsets": [0, 4]}}',
            '{"w": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}}',
            '{"w": {"dtype": "F32", "shape": [1], "data_offsets": [-4, 0]}}',
            '{"w": {"dtype": "F32", "shape": [1], "data_offsets": [0]}}',
            '{"w": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4], "more": 1}}',
            '{"w": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]},'
            ' "v": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}',
            '{"__metadata__": {"facts": "x"}, "w": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}',
            "[" * 100_000,
            '{"__metadata__": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}',
            r'{"\ud800": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}',
            r'{"\u001b[2J": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}',
            # Not aligned to its type, between two bytes.
            '{"a": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]},'
            ' "w": {"dtype": "F16", "shape": [1], "data_offsets": [1, 3]},'
            ' "z": {"dtype": "U8", "shape": [1], "data_offsets": [3, 4]}}',
            # Empty, but with more values in its other axes than torch can count.
            '{"w": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}, "v": {"dtype": "F32",'
            ' "shape": [140737488355328, 140737488355328, 0], "data_offsets": [4, 4]}}',
            '{"w": {"dtype": "F32", "shape": [' + "1," * 20 + '1], "data_offsets": [0, 4]}}',
        ],
    )
    def test_header_that_does_not_describe_the_file_is_rejected(self, tmp_path, header):
        self.write(tmp_path / "x", header)
        with pytest.raises(TrainingError, match="not a file of tensors") as refused:
            check_tensors(tmp_path / "x")
        assert str(refused.value).isascii()
        assert str(refused.value).isprintable()

    def test_header_that_is_not_padded_is_rejected_as_the_tensors_are_not_aligned(self, tmp_path):
        header = '{"w": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}'
        self.write(tmp_path / "x", header)
        assert check_tensors(tmp_path / "x") == 4
        self.write(tmp_path / "x", header, padded=False)
        with pytest.raises(TrainingError, match="a multiple of 8 bytes"):
            check_tensors(tmp_path / "x")

    @pytest.mark.parametrize("content", [b"", b"\xff" * 8, b"\x05" + b"\0" * 7 + b"{}", b"\x80\x04K\x01."])
    def test_file_without_a_header_is_rejected(self, tmp_path, content):
        (tmp_path / "x").write_bytes(content)
        with pytest.raises(TrainingError, match="not a file of tensors"):
            check_tensors(tmp_path / "x")

    @given(at=st.integers(0, 600), byte=st.integers(0, 255))
    def test_file_that_passes_with_a_changed_byte_can_be_read(self, tmp_path_factory, at, byte):
        path = tmp_path_factory.mktemp("mutant") / "x"
        write_tensors(path, STATE)
        content = bytearray(path.read_bytes())
        content[at % len(content)] = byte
        path.write_bytes(content)
        try:
            check_tensors(path)
        except TrainingError:
            return
        read_tensors(path)
