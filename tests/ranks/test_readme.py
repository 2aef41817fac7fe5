"""What README.md shows runs, and does what it says."""

import re
from pathlib import Path

from torch.nn.functional import scaled_dot_product_attention

from cp_styles import head_tail
from cp_styles.testing import run_ranks

README = (Path(__file__).parents[2] / "README.md").read_text()


def test_the_example_is_the_attention_of_all_tokens():
    source = re.search(r"<!-- example -->\n```python\n(.*?)```", README, re.DOTALL)[1]

    def example(rank):
        names = {}
        exec(source, names)
        return [names[name].detach() for name in ["q", "k", "v", "out"]] + [names[name].grad for name in "qkv"]

    layout = head_tail(1000, 2)
    q, k, v, out, *grads = (layout.unshard(parts, 2) for parts in zip(*run_ranks(example, 2), strict=True))
    inputs = [x.requires_grad_() for x in (q, k, v)]
    expected = scaled_dot_product_attention(*inputs, is_causal=True)
    expected.sum().backward()
    # float32: a few 1e-7 from the order of summation; a row of a wrong mask would be off by its own size.
    for found, wanted in zip([out, *grads], [expected.detach(), *(x.grad for x in inputs)], strict=True):
        assert (found - wanted).norm() / wanted.norm() < 1e-5


def test_the_two_commands_are_there_for_ci_to_take():
    commands = dict(re.findall(r"<!-- command: (.*?) -->\n```bash\n(.*?)\n```", README))
    assert commands["main job"].endswith("torchrun --nproc-per-node 4 tutorials/train_llama.py")
    assert commands["tests"].endswith("pytest")
