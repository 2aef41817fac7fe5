"""The kernels that are known by name, as flash-linear-attention 0.6.0, mamba-ssm 2.3.2 and causal-conv1d 1.7.0 define
them; and the stand-ins of these tests. The packages need a GPU, so their signatures are written down here."""

from __future__ import annotations

import importlib
import inspect

import pytest

from cp_styles.integrations import layers
from cp_styles.mixers import Channels
from cp_styles.mixers.recurrence import _UNSUPPORTED, KNOWN
from tests.ranks.mixers import kernels

STATE = "scale initial_state output_final_state"
PACKED = "cu_seqlens cu_seqlens_cpu"
# What says how gates, keys and values are computed, or how a kernel runs; it is of each token or of a head.
HARMLESS = (
    "scale use_qk_l2norm_in_kernel use_beta_sigmoid_in_kernel allow_neg_eigval state_v_first use_gate_in_kernel A_log "
    "dt_bias safe_gate lower_bound disable_recompute use_graph max_num_seqs layer_idx num_layers g_gamma gk chunk_size "
    "dt_softplus dt_limit delta_softplus D z g beta dt A C backend activation bias weight"
)
DOCUMENTS = {"cu_seqlens", "cu_seqlens_cpu", "seq_idx", "chunk_indices"}
SIGNATURES = {
    "fla.ops.gated_delta_rule": {
        "chunk_gated_delta_rule": f"q k v g beta {STATE} use_qk_l2norm_in_kernel use_beta_sigmoid_in_kernel "
        f"allow_neg_eigval state_v_first {PACKED} chunk_indices cp_context",
        "fused_recurrent_gated_delta_rule": f"q k v g gk gv beta {STATE} use_qk_l2norm_in_kernel use_gate_in_kernel "
        "A_log dt_bias use_beta_sigmoid_in_kernel allow_neg_eigval state_v_first cu_seqlens",
    },
    "fla.ops.delta_rule": {
        "chunk_delta_rule": f"q k v beta {STATE} use_qk_l2norm_in_kernel {PACKED}",
        "fused_recurrent_delta_rule": f"q k v beta {STATE} use_qk_l2norm_in_kernel cu_seqlens",
    },
    "fla.ops.kda": {
        "chunk_kda": f"q k v g beta {STATE} use_qk_l2norm_in_kernel use_gate_in_kernel use_beta_sigmoid_in_kernel "
        "allow_neg_eigval safe_gate lower_bound disable_recompute return_intermediate_states state_v_first "
        f"{PACKED} cp_context use_graph max_num_seqs",
        "fused_recurrent_kda": "q k v g beta A_log dt_bias scale initial_state output_final_state "
        "use_qk_l2norm_in_kernel use_gate_in_kernel use_beta_sigmoid_in_kernel allow_neg_eigval lower_bound "
        "state_v_first cu_seqlens",
    },
    "fla.ops.gla": {
        "chunk_gla": f"q k v g {STATE} state_v_first {PACKED}",
        "fused_recurrent_gla": f"q k v gk gv {STATE} reverse state_v_first cu_seqlens",
    },
    "fla.ops.simple_gla": {"chunk_simple_gla": f"q k v g g_gamma {STATE} state_v_first {PACKED}"},
    "fla.ops.retention": {"chunk_retention": f"q k v {STATE} cu_seqlens"},
    "fla.ops.lightning_attn": {"chunk_lightning_attn": f"q k v layer_idx num_layers {STATE} cu_seqlens"},
    "fla.modules.causal_conv1d.ops": {
        "causal_conv1d": "x weight bias residual initial_state output_final_state activation backend "
        f"{PACKED} chunk_indices cp_context",
    },
    "mamba_ssm.ops.triton.ssd_combined": {
        "mamba_chunk_scan_combined": "x dt A B C chunk_size D z dt_bias initial_states seq_idx cu_seqlens dt_softplus "
        "dt_limit return_final_states return_varlen_states",
    },
    "mamba_ssm.ops.selective_scan_interface": {
        "selective_scan_fn": "u delta A B C D z delta_bias delta_softplus return_last_state",
    },
    "causal_conv1d.causal_conv1d_interface": {
        "causal_conv1d_fn": "x weight bias seq_idx initial_states return_final_states final_states_out activation",
    },
}


def words(text: str) -> list[str]:
    return text.split()


ALL = {name: words(text) for functions in SIGNATURES.values() for name, text in functions.items()}


def test_every_argument_is_passed_on_understood_or_refused():
    for name, arguments in ALL.items():
        how = KNOWN.get(name)
        if how is None:
            understood = {"x", *layers._UNSUPPORTED}
        elif isinstance(how, Channels):
            understood = {*how.cut, *how.shared, *how.parameters, how.wants}
        else:
            understood = {*how.value, *how.key, how.state, how.wants, "q", "k", *_UNSUPPORTED}
            assert {how.state, how.wants} <= set(arguments)
            assert all(set(names) & set(arguments) for names in (how.value, how.key))
        assert not set(arguments) - understood - set(words(HARMLESS)) - DOCUMENTS, name


def names_of(function) -> list[str]:
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return [each.name for each in inspect.signature(function).parameters.values() if each.kind in kinds]


@pytest.mark.parametrize("name", sorted(ALL.keys() & vars(kernels).keys()))
def test_stand_ins_have_the_arguments_in_their_order(name):
    named = names_of(getattr(kernels, name))
    assert [each for each in ALL[name] if each in named] == named
    assert named[:4] == ALL[name][:4]


def test_installed_packages_have_them():
    for module, functions in SIGNATURES.items():
        try:
            installed = importlib.import_module(module)
        except ImportError:  # of the package, or of what it needs of a GPU
            continue
        for name in functions:
            assert names_of(inspect.unwrap(getattr(installed, name))) == ALL[name]
