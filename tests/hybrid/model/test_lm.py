"""The whole model: one pass, its parts, its inputs, its accounts."""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hybrid.layers import LayerError
from hybrid.model import HybridLM, ModelError
from hybrid.model.block import ffn_width
from hybrid.recipe.letters import layer_specs
from hybrid.recipe.schema import Recipe

from ..mini import EQUAL, borders, build, difference, ids, mini, section


def loss_and_gradients(model, text, **call):
    labels = torch.roll(text, -1, 1)
    model.zero_grad()
    loss = model(text, labels=labels, **call)
    (loss.total / loss.tokens).backward()
    return loss, {name: p.grad.clone() for name, p in model.named_parameters()}


def close(ours, theirs, tolerance=1e-5):
    for name, gradient in theirs.items():
        assert (ours[name] - gradient).abs().max() <= tolerance * gradient.abs().max() + 1e-9, name


# Inputs


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (torch.tensor([[1, 320]]), r"ids\[0, 1\] is 320; the vocabulary allows 0 to 319"),
        (torch.tensor([[1, 2], [-1, 2]]), r"ids\[1, 0\] is -1"),
        (torch.tensor([[1.0, 2.0]]), "ids must be int64 or int32, got torch.float32"),
        (torch.tensor([[True]]), "got torch.bool"),
        (torch.tensor([1, 2]), r"\[batch, tokens\] with at least one token, got \(2,\)"),
        (torch.empty(1, 0, dtype=torch.int64), r"got \(1, 0\)"),
        (torch.empty(0, 3, dtype=torch.int64), r"got \(0, 3\)"),
    ],
)
def test_ids_that_are_none_are_refused(wrong, words):
    with pytest.raises(ModelError, match=words):
        mini("F")(wrong)


def test_labels_that_do_not_fit_are_refused():
    model, text = mini("F"), ids(4)
    with pytest.raises(ModelError, match=r"labels have shape \(1, 3\), ids \(1, 4\)"):
        model(text, labels=text[:, :3])
    with pytest.raises(ModelError, match=r"labels\[0, 2\] is -1; the vocabulary allows 0 to 319, or -100"):
        model(text, labels=torch.tensor([[1, -100, -1, 2]]))


@pytest.mark.parametrize("lengths", [(3, 0, 2), (3, 3), (6,)])
def test_borders_that_do_not_cut_the_row_are_refused(lengths):
    with pytest.raises(LayerError):
        mini("F")(ids(5), cu_seqlens=borders(*lengths))


def test_models_that_cannot_be_built_are_refused():
    with pytest.raises(ModelError, match="vocab_size is None"):
        build(section("F", vocab_size=None))
    with pytest.raises(ModelError, match="at least one layer"):
        HybridLM(section("F"), [])
    with pytest.raises(ModelError, match="feed_forward is 'relu'; allowed: relu2, swiglu, gelu"):
        build(section("F", feed_forward="relu"))
    with pytest.raises(ModelError, match="width 0"):
        build(section("F", ffn_expansion=0.1))
    with pytest.raises(LayerError, match="norm 'batchnorm'"):
        build(section("F", norm="batchnorm"))


def test_unequal_widths_of_shared_values_are_refused():
    sections = (section("F", defaults={"num_heads": 4, "num_kv_heads": heads}) for heads in (2, 1))
    wide, narrow = (layer_specs(one)[0] for one in sections)
    with pytest.raises(ModelError, match=r"layer 1 \(full\) has values of width 16, layer 0 .* 32"):
        HybridLM(section("FF"), [wide, narrow])


def test_the_first_layer_with_a_value_residual_shares_its_values():
    layers = {"A": {"kind": "full", "value_residual": False}, "F": {"kind": "full"}}
    model = mini("AFF", layers=layers)
    assert [block.mixer.site.first_of_kind for block in model.blocks] == [False, True, False]
    assert model(ids(5))[0].isfinite().all()


# Parts


@pytest.mark.parametrize(("expansion", "width"), [(4.0, 256), (2.7, 160), (8 / 3, 160), (0.5, 32)])
def test_feed_forward_width_is_rounded_down_to_32(expansion, width):
    assert ffn_width(section(ffn_expansion=expansion)) == width
    assert mini("F", ffn_expansion=expansion).blocks[0].ffn.c_fc.out_features == width
    assert ffn_width(section(ffn_expansion=expansion, ffn_size=50)) == 50


@pytest.mark.parametrize("shift", [False, True])
@pytest.mark.parametrize("form", ["relu2", "swiglu", "gelu"])
def test_feed_forwards_compute_their_formula(form, shift):
    ffn = mini("F", feed_forward=form, ffn_token_shift=shift).blocks[0].ffn
    h = torch.randn(2, 7, 64)
    x = h.clone()
    if shift:
        before = torch.cat([torch.zeros(2, 1, 64), h[:, :-1]], 1)  # zero before the first token
        x = h + ffn.x_k * (before - h)
    up = x @ ffn.c_fc.weight.T
    inner = {
        "relu2": lambda: up.clamp(min=0) ** 2,
        "gelu": lambda: up * (1 + torch.erf(up / 2**0.5)) / 2,
        "swiglu": lambda: (x @ ffn.c_gate.weight.T) * torch.sigmoid(x @ ffn.c_gate.weight.T) * up,
    }[form]()
    assert difference(ffn(h), inner @ ffn.c_proj.weight.T) <= 1e-5


@pytest.mark.parametrize("norm", ["layernorm", "rmsnorm"])
def test_the_backbone_is_the_sum_of_scaled_sublayers(norm):
    model = mini("F2", norm=norm, residual_scale=0.5, logit_softcap=3.0)
    text = ids(9)
    x = x0 = model.embedding_norm(model.embedding(text))
    shared = {}
    from hybrid.layers import Context

    for block in model.blocks:
        h = block.norm_mixer(x)
        context = Context.of(h, want_state=False, embedding=block.norm_mixer(x0), first_values=shared)
        x = x + 0.5 * block.mixer(h, context)[0]
        x = x + 0.5 * block.ffn(block.norm_ffn(x))
    logits = model.norm(x) @ model.head.weight.T
    assert difference(model(text)[0], 3 * torch.tanh(logits / 3)) <= 1e-5


def test_a_llama_like_model_is_plain_parts():
    defaults = {
        "num_heads": 4,
        "num_kv_heads": 2,
        "rotary_style": "standard",
        "rotary_dim": 16,
        "qk_norm": "none",
        "token_shift": False,
        "value_residual": False,
        "qkv_bias": True,
    }
    changes = {"feed_forward": "swiglu", "norm": "rmsnorm", "embedding_norm": False, "ffn_token_shift": False}
    model = build(section("F2", tie_embeddings=True, ffn_size=96, defaults=defaults, **changes))
    names = {name.removeprefix("blocks.0.") for name in model.state_dict() if "blocks.1" not in name}
    mixer = {f"mixer.c_{x}.{p}" for x in "qkv" for p in ("weight", "bias")} | {"mixer.c_proj.weight"}
    ffn = {"ffn.c_gate.weight", "ffn.c_fc.weight", "ffn.c_proj.weight"}
    norms = {"norm_mixer.weight", "norm_ffn.weight", "norm.weight"}
    assert names == {"embedding.weight", *mixer, *ffn, *norms}
    logits, state = model(ids(9))
    assert logits.shape == (1, 9, 320)
    assert state.layers[0].last is None


# Tied embeddings


def test_tied_embeddings_are_one_parameter_stored_once():
    model = mini(tie_embeddings=True)
    assert "head.weight" not in model.state_dict()
    assert "head.weight" not in dict(model.named_parameters())
    assert model.head.weight is model.embedding.weight
    with torch.device("meta"):
        other = build(section(tie_embeddings=True))
    other.to_empty(device="cpu")
    assert other.head.weight is other.embedding.weight
    for assign in (False, True):
        other.load_state_dict(model.state_dict(), strict=True, assign=assign)
        assert other.head.weight is other.embedding.weight
        assert torch.equal(other(ids(20))[0], model(ids(20))[0])


def test_tied_embeddings_get_both_gradients():
    tied = mini("F", tie_embeddings=True)
    free = mini("F")
    free.load_state_dict({**tied.state_dict(), "head.weight": tied.embedding.weight.detach()})
    _, ours = loss_and_gradients(tied, ids(20))
    _, theirs = loss_and_gradients(free, ids(20))
    both = theirs["embedding.weight"] + theirs["head.weight"]
    close({"w": ours["embedding.weight"]}, {"w": both})


# Loss, packed rows, recomputation


def test_the_loss_is_the_cross_entropy_of_the_logits_whatever_the_chunk():
    model, text = mini(), ids(50, batch=2)
    labels = torch.roll(text, -1, 1)
    labels[:, -1] = -100
    logits = model(text)[0].flatten(0, 1)
    expected = torch.nn.functional.cross_entropy(logits, labels.flatten(), reduction="sum")
    for chunk in (7, 2048):
        model.loss_chunk = chunk
        loss = model(text, labels=labels)
        assert loss.tokens.item() == 98
        assert loss.total.item() == pytest.approx(expected.item(), rel=1e-5)


@settings(max_examples=6, deadline=None, derandomize=True)
@given(lengths=st.lists(st.integers(1, 70), min_size=1, max_size=4))
def test_packed_rows_equal_the_documents_alone(lengths):
    """huggingface/transformers#46773: no padding anywhere; unequal lengths share one row."""
    model, text = mini("KRWFB"), ids(sum(lengths), seed=len(lengths))
    model.loss_chunk = 16
    packed, _ = model(text, cu_seqlens=borders(*lengths), want_state=False)
    with_state, states = model(text, cu_seqlens=borders(*lengths))
    alone = [model(part) for part in text.split(lengths, 1)]
    together = torch.cat([logits for logits, _ in alone], 1)
    assert difference(packed, together) <= EQUAL
    assert difference(with_state, together) <= EQUAL
    assert [state.position for state in states] == lengths
    for ours, (_, theirs) in zip(states, alone, strict=True):
        for name, tensor in theirs.tensors().items():
            assert difference(ours.tensors()[name], tensor) <= EQUAL, name


def test_packed_rows_have_the_gradients_of_the_documents_alone():
    model, text, lengths = mini("KRWFB"), ids(130), (5, 70, 1, 54)
    loss, packed = loss_and_gradients(model, text, cu_seqlens=borders(*lengths))
    labels = torch.roll(text, -1, 1)
    model.zero_grad()
    total = 0
    for part, wanted in zip(text.split(lengths, 1), labels.split(lengths, 1), strict=True):
        total = total + model(part, labels=wanted).total
    (total / 130).backward()
    assert loss.total.item() == pytest.approx(total.item(), rel=1e-5)
    close(packed, {name: p.grad for name, p in model.named_parameters()}, 1e-4)


@pytest.mark.parametrize("lengths", [None, (20, 70, 60)])
def test_recomputing_blocks_changes_neither_loss_nor_gradients(lengths):
    model, text = mini("KWRKF"), ids(150)
    call = {} if lengths is None else {"cu_seqlens": borders(*lengths)}
    plain, theirs = loss_and_gradients(model, text, **call)
    model.activation_checkpointing = True
    again, ours = loss_and_gradients(model, text, **call)
    assert again.total.item() == plain.total.item()
    close(ours, theirs, 1e-6)


def test_recomputing_blocks_keeps_less():
    def kept(checkpointing):
        model, total = mini(), [0]
        model.activation_checkpointing = checkpointing

        def pack(tensor):
            total[0] += tensor.numel()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            model(ids(128), labels=ids(128))
        return total[0]

    assert kept(True) < kept(False) / 5


def test_recorded_routes_can_be_replayed():
    model, text, routes = mini(), ids(100), {}
    logits, _ = model(text, routes=routes)
    assert list(routes) == [0]  # the KVM layer alone chooses slots
    again, _ = model(text, routes=routes)
    assert torch.equal(logits, again)


def test_statistics_are_left_by_the_layers_that_have_them():
    statistics = {}
    model, text = mini(), ids(100)
    model(text, labels=text, statistics=statistics)
    assert {name.partition("/")[0] for name in statistics} == {"0", "1"}  # of KVM and RWKV-7
    assert all(torch.as_tensor(value).isfinite().all() for value in statistics.values())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_runs_in_its_own_dtype(dtype):
    """No mixed-dtype error; logits and loss are fp32; near the float64 model."""
    exact = mini("KRWFB").double()
    half = copy.deepcopy(exact).to(dtype)
    text, routes = ids(100), {}
    wanted, _ = exact(text, routes=routes)
    logits, _ = half(text, routes=routes)
    assert logits.dtype == torch.float32
    assert difference(logits, wanted) <= 0.15 * wanted.std().item()
    loss = half(text, labels=text, routes=routes)
    assert loss.total.dtype == torch.float32
    loss.total.backward()
    for name, parameter in half.named_parameters():
        assert parameter.grad.dtype == dtype, name
        assert parameter.grad.isfinite().all(), name


def test_fp32_is_near_float64():
    model, text, routes = mini("KRWFB"), ids(100), {}
    logits, _ = model(text, routes=routes)
    wanted, _ = copy.deepcopy(model).double()(text, routes=routes)
    assert difference(logits, wanted) <= 1e-5


def test_autocast_runs_and_gives_an_fp32_loss():
    model, text = mini("KRWFB"), ids(60)
    plain = model(text, labels=text).total
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(text, labels=text)
    loss.total.backward()
    assert loss.total.dtype == torch.float32
    assert loss.total.item() == pytest.approx(plain.item(), rel=0.02)
    assert all(p.grad.isfinite().all() for p in model.parameters())


# Accounts


def test_parameter_parts_sum_to_the_whole_on_the_meta_device():
    for tied in (False, True):
        with torch.device("meta"):
            model = build(section("(KW)2F", tie_embeddings=tied))
        parts = model.parameter_parts()
        assert sum(parts.values()) == sum(p.numel() for p in model.parameters())
        assert parts["embedding"] == 320 * 64
        assert parts["feed-forward"] == 5 * (2 * 64 * 256 + 64)
        assert parts["norms"] == 12 * 2 * 64
        assert parts.get("head") == (None if tied else 320 * 64)
        mixers = [sum(p.numel() for p in model.blocks[i].mixer.parameters()) for i in range(5)]
        assert parts["mixer kvm"] == mixers[0] + mixers[2]


def test_flops_of_the_dense_parts():
    with torch.device("meta"):
        model = build(section("F", feed_forward="swiglu"))
    mixer = model.blocks[0].mixer
    dense = 2 * 64 * 320 + 2 * 3 * 64 * 256
    assert model.flops_per_token(100).differentiable == dense + mixer.flops_per_token(100).differentiable
    assert model.flops_at(99).forward == dense + mixer.flops_at(99).forward
    assert model.flops_per_token(8).training == 3 * model.flops_per_token(8).forward


@pytest.mark.parametrize("pattern", ["KRWFB", "F"])
def test_decoding_flops_average_to_those_of_a_sequence(pattern):
    model = mini(pattern)
    length = 96
    mean = sum(model.flops_at(position).differentiable for position in range(length)) / length
    assert mean == pytest.approx(model.flops_per_token(length).differentiable, rel=1e-6)


@pytest.mark.parametrize("length", [1, 15, 33, 100])
def test_state_bytes_are_those_of_a_state(length):
    model = mini("KRWFB")
    _, state = model(ids(length))
    assert state.nbytes == model.state_bytes(length)


def test_only_matrices_decay():
    model = mini("KRWFB")
    without = model.no_decay()
    for name, parameter in model.named_parameters():
        vector = parameter.ndim < 2 or name.endswith("mixer.r_k")  # RWKV-7's vector, kept by heads
        assert (name in without) == vector, name
    assert "blocks.0.ffn.x_k" in without
    assert "embedding.weight" not in without


def test_a_recipe_is_enough():
    recipe = Recipe(model=section("KF"))
    assert [spec.kind for spec in HybridLM.from_recipe(recipe).layers] == ["kvm", "full"]
