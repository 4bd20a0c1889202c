"""Test Python that a model wrote, as HumanEval does (Chen et al., "Evaluating Large Language Models
Trained on Code", 2021, arXiv:2107.03374).

The code runs in a process of its own, in an empty folder, for a limited time. It is not confined
otherwise: it may do whatever the user may do. Run it where that does no harm, such as a container.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile

SECONDS = 10
"""Time limit of one program"""


def passes(text: str, prompt: str, tests: str) -> bool:
    """Whether the function in an answer passes its tests.

    Args:
        text: the answer, with the function in its first block of code, or anywhere if it has none.
        prompt: the beginning of the function, after the imports and functions that it needs.
        tests: code that raises an error if the function is wrong.
    """
    block = re.search(r"```(?:python)?\n(.*?)(?:```|\Z)", text, re.DOTALL)
    written = block[1] if block else text
    *_, function = re.finditer(r"^def ", prompt, re.MULTILINE)
    program = "\n".join([prompt[: function.start()], written, tests])
    with tempfile.TemporaryDirectory() as folder:
        try:
            ended = subprocess.run(
                [sys.executable, "-I", "-c", program], cwd=folder, timeout=SECONDS,
                stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return False
    return ended.returncode == 0
