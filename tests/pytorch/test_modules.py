"""Quantized layers: quantize_, moves and copies, state dicts, training beside frozen weights."""

from __future__ import annotations

import copy
import io
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import polyquant as pq
from polyquant.torch import (
    LoRALinear,
    QEmbedding,
    QLinear,
    QParameter,
    lora_,
    lora_state,
    quantize_,
)
from tagger import Tagger

SCHEMES = (
    "q8s/row:f32",
    "q4s/32:f16",
    "nf4",
    "mxfp4",
    "nvfp4",
    "u4/32:f16-zero:u4",
    "u4[nf4]/32:(u8[dynamic8u]/256:f32)",
)
INDICES = torch.arange(10).reshape(2, 5)


def _tagger(scheme: str = "nf4", **options: Any) -> Any:
    torch.manual_seed(0)
    return quantize_(Tagger(), scheme, **options)


def _bytes(module: nn.Module) -> dict[str, bytes]:
    """The bytes of every quantized weight by its name."""
    return {
        name: child.qtensor.to_data().bytes
        for name, child in module.named_modules()
        if isinstance(child, QParameter)
    }


# -- quantize_ --------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", SCHEMES)
def test_layers_compute_with_the_quantized_weights(scheme: str) -> None:
    torch.manual_seed(0)
    plain = Tagger()
    made = quantize_(copy.deepcopy(plain), scheme)
    with torch.no_grad():
        for name in ("up", "down", "head"):  # the embedding is the head's
            weight = plain.get_submodule(name).weight
            weight.copy_(pq.quantize(weight, scheme).dequantize())
    torch.testing.assert_close(made(INDICES), plain(INDICES))
    assert type(made.up) is QLinear and type(made.embedding) is QEmbedding
    assert type(made.attention.out_proj) is type(plain.attention.out_proj)  # its weight is read
    assert made.head.weight is made.embedding.weight  # tied
    assert made.up.bias is not None and made.up.bias.requires_grad
    assert repr(made.up).startswith("QLinear(\n  in_features=32, out_features=64, bias=True, sch")


def test_patterns_choose_layers_and_embeddings_by_their_whole_name() -> None:
    def kinds(module: Any) -> set[str]:
        kinds = (QLinear, QEmbedding)
        return {name for name, child in module.named_modules() if isinstance(child, kinds)}

    def untied() -> Tagger:
        made = Tagger()
        made.head = nn.Linear(32, 10)
        return made

    assert kinds(quantize_(untied(), "q4s")) == {"up", "down", "head"}
    assert kinds(quantize_(untied(), "q4s", include="*")) == {"up", "down", "head"}
    assert kinds(quantize_(untied(), "q4s", include=["u*", "embedding"])) == {"up", "embedding"}
    assert kinds(quantize_(untied(), "q4s", exclude=["head", "d*"])) == {"up"}
    assert kinds(quantize_(Tagger(), "q4s", include="head")) == {"head", "embedding"}
    for options in ({"include": "nope"}, {"exclude": "nope"}, {"include": "embed*"}):
        with pytest.raises(pq.errors.NothingMatches):
            quantize_(untied(), "q4s", **options)
    with pytest.raises(pq.errors.NothingMatches, match="Among the linear layers"):
        quantize_(nn.Sequential(nn.Conv2d(1, 1, 1)), "q4s")
    with pytest.raises(pq.errors.NothingMatches, match="Among the linear layers"):
        quantize_(untied(), "q4s", exclude="*")


def test_one_layer_in_two_places_stays_one() -> None:
    layer = nn.Linear(8, 8)
    made = quantize_(
        nn.Sequential(layer, nn.ReLU(), nn.ModuleDict({"again": layer})), "q8s/row:f32"
    )
    assert isinstance(made[0], QLinear) and made[0] is made[2]["again"]


def _refusals() -> dict[str, tuple[type[Exception], str, Callable[[], Any]]]:
    errors = pq.errors

    def hooked() -> nn.Module:
        model = Tagger()
        model.down.register_forward_hook(lambda *_: None)
        return model

    def infinite() -> nn.Module:
        model = Tagger()
        model.down.weight.data[0, 0] = torch.inf
        return model

    def tied_elsewhere() -> nn.Module:
        model = Tagger()
        model.own = nn.Module()
        model.own.register_parameter("matrix", model.up.weight)
        return model

    def normed() -> nn.Module:
        return nn.Sequential(_weight_normed(), nn.Linear(4, 4))

    def on_meta() -> nn.Module:
        with torch.device("meta"):
            return Tagger()

    invalid = errors.InvalidArgument
    left_out = {"include": "embedding", "exclude": "head"}
    return {
        "quantized already": (errors.AlreadyQuantized, "^up ", lambda: (_tagger(), {})),
        "tied and left out": (invalid, "share one weight", lambda: (Tagger(), left_out)),
        "tied to a stranger": (invalid, "no plain layer", lambda: (tied_elsewhere(), {})),
        "with a hook": (invalid, "hooks", lambda: (hooked(), {})),
        "a computed weight": (invalid, "whose weight is a parameter", lambda: (normed(), {})),
        "not finite": (errors.NonFiniteInput, "infin", lambda: (infinite(), {})),
        "on meta": (errors.UnsupportedArray, "Load the weights first", lambda: (on_meta(), {})),
        "max_norm": (invalid, "max_norm", _with_max_norm),
        "a scheme": (errors.PolyquantError, "q4z", lambda: (Tagger(), {"scheme": "q4z"})),
        "a calibration": (errors.UnknownName, "mid", lambda: (Tagger(), {"calibration": "mid"})),
        "activations": (errors.PolyquantError, "q4z", lambda: (Tagger(), {"activations": "q4z"})),
        "a layer alone": (invalid, "from_linear", lambda: (nn.Linear(4, 4), {})),
    }


def _weight_normed() -> nn.Module:
    layer = nn.Linear(4, 4)
    weight = layer.weight.data
    del layer.weight
    layer.weight = weight  # what weight_norm's hook leaves: a tensor that is no parameter
    return layer


def _with_max_norm() -> tuple[nn.Module, dict[str, Any]]:
    model = nn.Sequential(nn.Embedding(4, 8, max_norm=1.0), nn.Linear(8, 8))
    return model, {"include": ["0", "1"]}


@pytest.mark.parametrize("case", _refusals())
def test_either_everything_is_replaced_or_nothing(case: str) -> None:
    error, text, make = _refusals()[case]
    module, options = make()
    options = dict(options)
    before = {name: id(child) for name, child in module.named_modules()}
    with pytest.raises(error, match=text):
        quantize_(module, options.pop("scheme", "nf4"), **options)
    assert {name: id(child) for name, child in module.named_modules()} == before


def test_an_error_of_the_numbers_names_the_layer() -> None:
    model = Tagger()
    model.down.weight.data[0, 0] = torch.nan
    with pytest.raises(pq.errors.NonFiniteInput) as caught:
        quantize_(model, "nf4")
    assert caught.value.__notes__ == ["The tensor is the weight of down; no layer was changed."]


def test_activations_are_quantized_at_every_call() -> None:
    made = _tagger(activations="q8s/row:f32")
    x = torch.randn(3, 32, requires_grad=True)
    q = made.up.weight.qtensor
    wanted = pq.linear(x.detach(), q, made.up.bias.detach(), activations="q8s/row:f32")
    assert torch.equal(made.up(x), wanted) and "activations='q8s/row:f32'" in repr(made.up)
    made.up(x).sum().backward()
    torch.testing.assert_close(x.grad, torch.ones(3, 64) @ q.dequantize())


def test_training_and_dtype_are_kept() -> None:
    model = Tagger().bfloat16().eval()
    made = quantize_(model, "nf4")
    assert not made.up.training and made.embedding(INDICES).dtype == torch.bfloat16
    assert made.up.weight.dtype == torch.bfloat16 and made.up.bias.dtype == torch.bfloat16
    assert made(INDICES).dtype == torch.bfloat16


# -- one layer --------------------------------------------------------------------------------


@pytest.mark.parametrize("bias", [True, False])
def test_a_layer_of_its_own_from_linear_and_from_a_tensor(bias: bool) -> None:
    torch.manual_seed(1)
    linear = nn.Linear(16, 4, bias)
    torch.manual_seed(1)
    alone = QLinear(16, 4, bias, scheme="q8s/row:f32")
    x = torch.randn(2, 16)
    wanted = pq.linear(x, pq.quantize(linear.weight, "q8s/row:f32"), linear.bias)
    assert torch.equal(alone(x), wanted)
    assert torch.equal(QLinear.from_linear(linear, "q8s/row:f32")(x), wanted)
    q = pq.quantize(linear.weight.T, "q8s/4:f32").T  # stored as (in, out)
    assert torch.equal(QLinear.from_qtensor(q, linear.bias)(x), pq.linear(x, q, linear.bias))


def test_what_a_layer_is_made_of_is_checked() -> None:
    vector = pq.quantize(torch.randn(16), "q4s/8:f16")
    for make in (QLinear.from_qtensor, lambda q: QEmbedding(QParameter(q))):
        with pytest.raises(pq.errors.InvalidArgument, match="two axes"):
            make(vector)
    with pytest.raises(pq.errors.InvalidArgument, match="on a device of torch's"):
        QParameter(vector.to("numpy"))


def test_an_embedding_looks_up_and_refuses_what_is_not_there() -> None:
    embedding = nn.Embedding(6, 16, padding_idx=1)
    made = QEmbedding.from_embedding(embedding, "nf4")
    indices = torch.tensor([[0, 5, 5], [2, 1, 0]])
    values = pq.quantize(embedding.weight, "nf4").dequantize()
    assert torch.equal(made(indices), values[indices]) and made.padding_idx == 1
    assert torch.equal(made(indices.int()), values[indices])
    for bad in (torch.tensor([6]), torch.tensor([-1])):
        with pytest.raises(pq.errors.InvalidIndex):
            made(bad)


@pytest.mark.parametrize("scheme", ["q4s/tensor:f32", "q4s/4x4:f16", "u4/3x16:f16-zero:u4"])
def test_an_embedding_with_blocks_over_rows(scheme: str) -> None:
    table = torch.randn(7, 16)
    q = pq.quantize(table, scheme)
    indices = torch.tensor([6, 0, 3, 3, 1])
    assert torch.equal(QEmbedding(QParameter(q))(indices), q.dequantize()[indices])


# -- copies and moves -------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", SCHEMES)
def test_no_number_changes_on_the_way(scheme: str, tmp_path: Path) -> None:
    made = _tagger(scheme)
    wanted, bits = made(INDICES), _bytes(made)
    buffer = io.BytesIO()
    torch.save(made, buffer)
    buffer.seek(0)
    for other in (
        copy.deepcopy(made),
        pickle.loads(pickle.dumps(made)),
        torch.load(buffer, weights_only=False),
        copy.deepcopy(made).half().bfloat16().to("cpu", torch.float64).float(),
    ):
        assert _bytes(other) == bits
        assert other.head.weight is other.embedding.weight
        if other.up.bias.equal(made.up.bias):  # of the float casts, biases are rounded
            assert torch.equal(other(INDICES), wanted)
    held = dict(made.named_parameters())
    assert all(p.dtype == torch.uint8 for n, p in held.items() if ".weight." in n)
    assert not any(p.requires_grad for n, p in held.items() if ".weight." in n)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_a_cast_model_computes_in_the_new_dtype(dtype: torch.dtype) -> None:
    made = _tagger().to(dtype)
    assert made.up.weight.dtype == dtype and made.up.weight.dequantize().dtype == dtype
    assert made(INDICES).dtype == dtype


def test_meta_and_back() -> None:
    made = _tagger()
    state, wanted = made.state_dict(), made(INDICES)
    gone = copy.deepcopy(made).to("meta")
    assert gone(INDICES.to("meta")).shape == (2, 5, 10)
    with pytest.raises(NotImplementedError, match="to_empty"):
        gone.to("cpu")
    with pytest.raises(pq.errors.DeviceMismatch):
        gone(INDICES)
    gone.to_empty(device="cpu").load_state_dict(state)
    assert torch.equal(gone(INDICES), wanted)
    with torch.device("meta"):
        fresh = QLinear(32, 64, scheme="nf4")
    fresh.load_state_dict(made.up.state_dict(), assign=True)
    x = torch.randn(2, 32)
    assert torch.equal(fresh.to("cpu")(x), made.up(x))


# -- state dicts ------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", SCHEMES)
def test_state_dicts_load_strictly(scheme: str) -> None:
    made = _tagger(scheme)
    torch.manual_seed(5)
    other = quantize_(Tagger(), scheme)
    assert _bytes(other) != _bytes(made)
    assert other.load_state_dict(made.state_dict()) == ([], [])
    assert _bytes(other) == _bytes(made) and torch.equal(other(INDICES), made(INDICES))


def test_names_in_a_state_dict() -> None:
    names = set(_tagger("u4[nf4]/32:(u8[dynamic8u]/256:f32)").up.state_dict())
    inner = {f"weight.scales.{name}" for name in ("data", "scales", "table", "description")}
    own = {"bias", *(f"weight.{name}" for name in ("data", "table", "description"))}
    assert names == own | inner
    two_levels = _tagger("nvfp4").up.state_dict()
    assert two_levels["weight.tensor_scale"].shape == (4,)


def test_another_scheme_shape_or_float_checkpoint_is_refused() -> None:
    made = _tagger("nf4")
    cases = (
        (quantize_(Tagger(), "q4s/64:f32").state_dict(), "holds is a q4s/64:f32 tensor"),
        (Tagger().state_dict(), "holds is a torch.float32 array"),
    )
    for state, text in cases:
        with pytest.raises(pq.errors.StateMismatch, match=text):
            made.load_state_dict(state)
    turned = QLinear.from_qtensor(pq.quantize(torch.randn(32, 32), "q4s/32:f16").T)
    with pytest.raises(pq.errors.StateMismatch, match=r"axes \(1, 0\)"):
        QLinear(32, 32, scheme="q4s/32:f16").load_state_dict(turned.state_dict(), strict=False)
    state = made.state_dict()
    state["up.weight.description"] = torch.zeros(3, dtype=torch.uint8)
    with pytest.raises(pq.errors.StateMismatch, match="cannot read"):
        made.load_state_dict(state)
    del state["up.weight.description"]
    with pytest.raises(RuntimeError, match="Missing key"):
        made.load_state_dict(state)


def test_safetensors_keep_tied_weights(tmp_path: Path) -> None:
    files = pytest.importorskip("safetensors.torch")
    made = _tagger()
    files.save_model(made, str(tmp_path / "model.safetensors"))
    torch.manual_seed(5)
    other = quantize_(Tagger(), "nf4")
    files.load_model(other, str(tmp_path / "model.safetensors"))
    assert torch.equal(other(INDICES), made(INDICES))
    assert other.head.weight is other.embedding.weight


# -- training ---------------------------------------------------------------------------------


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_gradient_checkpointing(use_reentrant: bool) -> None:
    made = _tagger()
    results = []
    for call in (lambda f, x: f(x), lambda f, x: checkpoint(f, x, use_reentrant=use_reentrant)):
        x = torch.linspace(-1, 1, 128).reshape(4, 32).requires_grad_()
        made.zero_grad()
        call(lambda x: made.down(made.up(x).relu()), x).sin().sum().backward()
        results.append((x.grad, made.up.bias.grad, made.down.bias.grad))
    for plain, again in zip(*results, strict=True):
        assert torch.equal(plain, again)


def test_functional_calls_and_gradients_for_each_example() -> None:
    layer = _tagger().up
    x = torch.randn(5, 32)

    def loss(bias: Tensor, x: Tensor) -> Tensor:
        made: Tensor = torch.func.functional_call(layer, {"bias": bias}, (x,))
        return made.sin().sum()

    each = torch.vmap(torch.func.grad(loss), in_dims=(None, 0))(layer.bias.detach(), x)
    layer(x).sin().sum().backward()
    torch.testing.assert_close(each.sum(0), layer.bias.grad)
    torch.testing.assert_close(torch.vmap(layer)(x.reshape(5, 1, 32))[:, 0], layer(x))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_adapters_train_beside_a_frozen_base(dtype: torch.dtype) -> None:
    made = _tagger().to(dtype)
    before = made(INDICES)
    assert lora_(made, rank=4, alpha=8) is made
    torch.testing.assert_close(made(INDICES), before)  # the attention is another kernel's now
    bits = _bytes(made)
    trained = {name for name, p in made.named_parameters() if p.requires_grad}
    assert trained == {f"{at}.lora_{ab}" for at in ("up", "down", "head") for ab in "ab"}
    assert set(lora_state(made)) == trained and made.up.lora_a.dtype == dtype
    torch.manual_seed(3)
    targets = torch.randint(0, 10, (10,))
    optimizer = torch.optim.Adam([p for p in made.parameters() if p.requires_grad], lr=0.03)
    losses = []
    for _ in range(20):
        loss = functional.cross_entropy(made(INDICES).reshape(10, 10).float(), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.2 * losses[0] and _bytes(made) == bits
    other = lora_(_tagger().to(dtype), rank=4, alpha=8)
    assert not other.load_state_dict(lora_state(made), strict=False).unexpected_keys
    assert torch.equal(other(INDICES), made(INDICES))


def test_which_layers_adapters_wrap() -> None:
    made = lora_(_tagger(), include="u*")
    assert isinstance(made.up, LoRALinear) and isinstance(made.down, QLinear)
    assert "rank=8, scaling=2" in repr(made.up)
    lora_(made, include="down")  # what is wrapped already is left alone
    assert isinstance(made.down, LoRALinear) and isinstance(made.up.base, QLinear)
    with pytest.raises(pq.errors.NothingMatches):
        lora_(_tagger(), include="embedding")
    with pytest.raises(pq.errors.InvalidArgument, match="call quantize_ first"):
        lora_(Tagger())
    for rank in (0, True, 2.5):
        with pytest.raises(pq.errors.InvalidArgument, match="rank"):
            lora_(_tagger(), rank=rank)


@pytest.mark.skipif(
    torch.torch_version.TorchVersion(torch.__version__) < (2, 13),
    reason="FSDP2 of torch 2.11 takes no integer parameters; 2.12 was not tried",
)
def test_sharded_over_two_processes() -> None:
    script = Path(__file__).with_name("sharded.py")
    command = [sys.executable, "-W", "error::UserWarning", str(script)]
    found = subprocess.run(command, capture_output=True, text=True, check=False, timeout=240)
    if "no process group" in found.stdout:
        pytest.skip(found.stdout.strip())
    assert found.returncode == 0, found.stderr
    assert found.stdout.split() == ["same", "same"]


# -- without gradients ------------------------------------------------------------------------


@pytest.mark.parametrize("activations", [None, "q8s/32:f32"])
@pytest.mark.parametrize("bias", [True, False])
def test_layers_that_need_no_gradient_give_the_same_bits(activations: Any, bias: bool) -> None:
    layer = QLinear(64, 48, bias, scheme="q4s-32", activations=activations)
    x = torch.randn(3, 5, 64)
    wanted = layer(x.requires_grad_()).detach()
    with torch.no_grad():
        assert torch.equal(layer(x), wanted)
        assert layer.weight.kept() is layer.weight.kept()
    with torch.inference_mode():
        assert torch.equal(layer(x.detach()), wanted)
        with pq.propagation("propagate"):
            assert type(layer(x.detach())) is torch.Tensor
        fresh = QLinear(64, 48, bias, scheme="q4s-32", activations=activations)
        assert fresh(x.detach()).shape == (3, 5, 48)


def test_a_kept_weight_is_that_of_the_bytes_as_they_are() -> None:
    layer, other = (QLinear(64, 48, scheme="nf4-double") for _ in range(2))
    x = torch.randn(3, 64)
    with torch.no_grad():
        before, first = layer(x), layer.weight.kept()
        layer.load_state_dict(other.state_dict())
        assert torch.equal(layer(x), other(x)) and not torch.equal(layer(x), before)
        assert layer.weight.kept() is not first
        scales = layer.weight.scales.scales
        scales.copy_((scales.view(torch.float32) * 2).view(torch.uint8))
        torch.testing.assert_close(layer(x) - layer.bias, 2 * (other(x) - other.bias))
        layer.load_state_dict(other.state_dict(), assign=True)
        assert torch.equal(layer(x), other(x))
        again = copy.deepcopy(layer)
        assert again.weight._kept is None and torch.equal(again(x), layer(x))
        stored = pickle.dumps(layer)
        assert torch.equal(pickle.loads(stored)(x), layer(x))
        layer.weight.kept()
        assert layer.double().weight._kept is None
