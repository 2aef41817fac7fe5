"""tutorials/troubleshooting.md and the errors of the package lead to each other: texts and titles, word for word."""

import ast
import functools
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "tutorials/troubleshooting.md").read_text()
# (title, quoted text): an entry quotes one or several.
QUOTED = [
    (title, quoted)
    for title, entry in re.findall(r"^#### (.+)\n((?:(?!^#{1,4} ).*\n?)*)", PAGE, re.MULTILINE)
    for quoted in re.findall(r"^> (.+)$", entry, re.MULTILINE)
]
TITLES = {title for title, _ in QUOTED}
# The test that runs a program as an entry says, and finds the result of one process.
REMEDIES = {
    "Inputs that were cut in another way": "ranks/doors/test_cut.py: the_same_cut_passes",
    "A layout of another length": "ranks/doors/test_scope.py: two_micro_batches_alive",
    "A tensor that was cut with another layout": "ranks/doors/test_cut.py: the_same_cut_passes",
    "Two layouts for one call": "ranks/doors/test_scope.py: a_fixed_layout",
    "A batch that nobody has cut": "ranks/doors/test_first_hour.py: is_refused_in_training_and_in_evaluation",
    "A rank that is not in the mesh": "ranks/doors/test_first_hour.py: ranks_outside_of_the_mesh_leave_the_call_out",
    "Ranks at different places": "ranks/doors/test_first_hour.py: a_loop_that_ends_early_ends_on_all_ranks",
    "Ranks that disagree": "ranks/engine/test_disagreement.py: functions_that_cut_alike",
    "A rank that has left half way": "ranks/doors/test_fused_calls.py: a_world_that_has_ended",
    "A process group that was destroyed": "ranks/doors/test_fused_calls.py: a_world_that_has_ended",
    "Parameters that differ": "ranks/engine/test_unreduced.py: experts_that_live_on_one_rank",
    "Gradients that are summed twice": "ranks/engine/test_batch.py: gradients_in_front_of_a_split",
    "Gradients that are averaged": "ranks/doors/test_first_hour.py: without_averaged_over_is_refused_and_with_it_exact",
    "Documents without a scope": "ranks/doors/test_batch_sharder.py: documents_without_a_scope",
    "A mean of means": "ranks/doors/test_first_hour.py: is_none_where_the_loss_is_one_of_all",
    "Gradients behind a gather": "ranks/engine/test_batch.py: gradients_behind_a_gather_that_are_shares",
    "A proof that is blind": "ranks/verify/test_verify.py: a_proof_that_is_blind",
    "A group that is not of the mesh": "ranks/verify/test_verify.py: a_group_that_is_not_of_the_mesh",
    "A model that was never compared": "ranks/verify/test_verify.py: a_model_that_was_never_compared_warns_once",
    "A path that was not proved": "ranks/verify/test_situations.py: a_second_proof_adds_to_the_first",
    "No attention was reached": "ranks/doors/test_errors.py: a_module_that_does_more_than_attend",
    "No attention was called": "clients/test_transformers.py: exact",
    "A block without attention": "ranks/doors/test_unseen.py: blocks_without_attention",
    "A layer that mixes tokens": "ranks/doors/test_readme.py: the_example_of_a_convolution",
    "Attention along another dim": "ranks/doors/test_unseen.py: attention_along_another_dim",
    "The style is on a whole attention block": "ranks/doors/test_errors.py: a_module_that_does_more_than_attend",
    "Blocks that are not found": "ranks/doors/test_backbone.py: blocks_that_are_named",
    "Blocks that do not run in turn": "ranks/doors/test_backbone.py: blocks_that_are_named",
    "An argument of a block whose sequence dim is not known": "ranks/doors/test_backbone.py: arguments_of_blocks",
    "Positions that are made between the blocks": "ranks/doors/test_backbone.py: positions_between_the_blocks",
    "Gradients of an output that differ": "ranks/doors/test_backbone.py: losses_that_differ",
    "A path that matches no module": "ranks/doors/test_guards.py: a_plan_whose_path_matches_nothing",
    "A mask of another length": "ranks/doors/test_attn_mask.py: a_mask_inside_the_module_fits_parts_of_any_size",
    "A mask of one part": "first_hours/test_first_hours.py: after",
    "Keys of several pieces": "ranks/doors/test_complaints.py: keys_of_several_passes",
    "A window that a part does not show": "ranks/doors/test_guards.py: windows_that_a_model_would_make_from_a_part",
    "Keys that were selected for other queries": "ranks/mixers/test_selection.py: any_cut",
    "Rows of other queries": "ranks/flex/test_query_rows.py: exact",
    "Layers with keys for groups of tokens": "clients/test_groups.py: exact",
    "Layers without a cache over the ranks": "clients/test_groups.py: a_copy_from_before_the_style_generates",
    "Dropout by position outside of the blocks": "ranks/doors/test_backbone.py: dropout_by_position",
    "Labels of sequences": "clients/test_heads.py: classes_under_the_other_style",
    "Dropout that is no module": "ranks/mixers/test_randomness.py: dropout",
    "Memory that is filled again": "ranks/flex/test_changed_in_place.py: documents_of_the_next_batch",
    "A BlockMask of another length": "ranks/flex/test_flex.py: inside_a_module",
    "A learned attention bias": "ranks/flex/test_flex_compiled.py: a_compiled_model",
    "Positions that count from 0": "clients/test_transformers.py: models_that_count_their_tokens",
    "Positions after the position of padding": "clients/test_transformers.py: positions_after_that_of_padding",
    "Pictures among the tokens": "clients/test_pictures.py: the_example_of_the_page",
    "Labels inside a model": "ranks/doors/test_batch_sharder.py: a_step_is_that_of_one_process",
    "A loss over tokens as classes": "clients/test_transformers.py: question_answering",
    "Tokens in front of a part": "clients/test_transformers.py: tokens_in_front_of_a_part",
    "Dropout in the attention": "clients/test_transformers.py: exact",
    "The same dropout on all ranks": "ranks/doors/test_training_page.py: a_seed_for_the_dropout_of_each_rank",
    "A loss of whole sequences": "clients/test_preferences.py: dpo",
    "Ranks with other samples": "clients/test_trainers.py: trainings",
    "An entry whose sequence dim is not known": "ranks/doors/test_batch_sharder.py: batches_that_cannot_be_cut",
    "Entries that belong to labels": "ranks/doors/test_batch_sharder.py: entries_that_belong_to_labels",
    "A collator in a worker process": "ranks/doors/test_batch_sharder.py: a_step_is_that_of_one_process",
    "A loader that accelerate does not share": "ranks/doors/test_batch_sharder.py: share_batches",
    "A loss for the balance of experts": "clients/test_transformers.py: a_loss_for_the_balance_of_experts_is_refused",
    "A mask that is dropped": "clients/test_trainers.py: trainings",
    "A text that is not the same on all ranks": "ranks/doors/test_joint.py: a_model_of_text_and_image",
    "generate() without a cache that is cut": "clients/test_generate.py: the_example_of_the_page",
    "Ranks that decode different tokens": "clients/test_generate.py: sampling",
    "A prompt with another attention_mask": "clients/test_generate.py: generate",
    "A cache of another prompt": "clients/test_generate.py: one_prefill_for_prompts_that_begin_alike",
    "Rows that a cache does not have": "clients/test_generate.py: beam_search",
    "Heads that do not fit": (
        "ranks/tensor_parallel/test_tp_refusals.py: key_heads_that_tp_does_not_divide_are_replicated"
    ),
    "A part that tensor parallelism does not divide": (
        "ranks/tensor_parallel/test_tp_refusals.py: lengths_that_tp_divides_and_plans_without_sequence_parallelism"
    ),
    "DTensors on other axes": "ranks/tensor_parallel/test_tp_attention.py: meshes",
    "An output whose heads are not found": "ranks/tensor_parallel/test_tp_attention.py: heads_that_are_joined_outside",
    "The sequence dim has moved": "ranks/doors/test_dims.py: tokens_along_any_dim",
    "A mesh without this axis": "ranks/tensor_parallel/test_tp_attention.py: axes_of_any_name_and_both_at_once",
    "A checkpoint under a SequenceScope": "ranks/doors/test_scope.py: checkpoint_with_the_scope",
    "A scope in another thread": "ranks/doors/test_scope.py: a_scope_that_another_thread_has_opened",
    "A function without a name": "ranks/compile/test_compile.py: other_configurations_are_other_graphs",
    "Tensors in the mask of a scope": "ranks/compile/test_compile.py: masks_that_are_tensors",
    "A module that cannot be pickled": "ranks/doors/test_training_page.py: a_checkpoint_that_other_ranks_go_on_with",
    "Buffers of different lengths": "ranks/doors/test_readme.py: a_table_that_is_longer_than_the_sequence",
    "A buffer that was cut before": "ranks/doors/test_torch_api.py: a_buffer_that_was_filled_again_is_a_whole_one",
    "A buffer that was computed": "ranks/doors/test_torch_api.py: a_result_is_cut_by_context_parallel_shard",
}
# The log of another rank has the reason, an environment variable is set, or the program is not possible.
WITHOUT_REMEDY = {
    "Another rank has failed",
    "A rank that has ended",
    "Machines that gloo does not connect",
    "Second derivatives",
    "A cache that a model changes",
}
VARIES = "\0"


def text_of(node: ast.AST) -> str:
    """A string of the source, with one character for what an f-string computes; titles of entries as they are."""
    if isinstance(node, ast.JoinedStr):
        return "".join(text_of(part) for part in node.values)
    if isinstance(node, ast.FormattedValue) and isinstance(node.value, ast.Call):
        called = node.value
        if isinstance(called.func, ast.Name) and called.func.id == "see":
            return f'. See "{ast.literal_eval(called.args[0])}" in'
    return str(node.value) if isinstance(node, ast.Constant) else VARIES


def strings_of(node: ast.AST):
    """The whole strings of a source; an f-string is one, not its parts."""
    if isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str)):
        yield text_of(node)
        return
    for child in ast.iter_child_nodes(node):
        yield from strings_of(child)


@functools.cache
def texts() -> list[str]:
    """All of the package. Not when this file is imported: every worker of a run imports it."""
    paths = sorted((ROOT / "cp_styles").rglob("*.py"))
    return [text for path in paths for text in strings_of(ast.parse(path.read_text()))]


def texts_like(quoted: str) -> list[str]:
    """ "..." on the page stands for one value, or for words that are left out, of the same text."""
    words = re.compile(r".+?".join(re.escape(part) for part in re.split(r"\s*\.\.\.\s*", quoted) if part), re.DOTALL)
    return [text for text in texts() if words.search(text)]


def test_there_are_entries():
    assert len(QUOTED) > 35
    assert len({quoted for _, quoted in QUOTED}) == len(QUOTED) == PAGE.count("\n> ")
    titles = re.findall(r"^#### (.+)$", PAGE, re.MULTILINE)
    assert sorted(titles) == sorted(TITLES)  # each once, and none without a text


@pytest.mark.parametrize(("title", "quoted"), QUOTED, ids=[quoted[:50] for _, quoted in QUOTED])
def test_each_quoted_text_is_in_the_package_and_names_its_entry(title: str, quoted: str):
    found = texts_like(quoted)
    assert found, f"no text of cp_styles reads like this any more: {quoted}"
    for text in found:
        assert f'. See "{title}" in' in text, f"this error does not name its entry: {text}"


def test_no_error_is_longer_than_four_lines_of_100_columns():
    """Without the values in it. The entry on the page says more."""
    paths = sorted((ROOT / "cp_styles").rglob("*.py"))
    nodes = [node for path in paths for node in ast.walk(ast.parse(path.read_text()))]
    errors = [text_of(node) for node in nodes if isinstance(node, ast.JoinedStr)]
    errors += [text for node in nodes if isinstance(node, ast.Raise) for text in strings_of(node)]
    assert len(errors) > 1000
    assert [text for text in errors if len(text) > 400] == []


def test_each_remedy_is_followed():
    assert REMEDIES.keys().isdisjoint(WITHOUT_REMEDY)
    assert {*REMEDIES, *WITHOUT_REMEDY} == TITLES
    for place in REMEDIES.values():
        path, _, name = place.partition(": ")
        assert f"def test_{name}(" in (ROOT / "tests" / path).read_text(), place


def test_each_entry_that_an_error_names_is_on_the_page():
    named = set(re.findall(r'\. See "([^"\0]+)" in', "\n".join(texts())))
    assert named == TITLES
    calls = sum(len(re.findall(r"\bsee\(", path.read_text())) for path in (ROOT / "cp_styles").rglob("*.py"))
    assert calls - 1 == len(re.findall(r'\. See "([^"\0]+)" in', "\n".join(texts())))  # all but its definition
