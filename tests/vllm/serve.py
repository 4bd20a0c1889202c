"""python tests/vllm/serve.py OPTION...: the command `vllm serve`, which does not start in vLLM's
CPU build."""

from __future__ import annotations

from vllm.entrypoints.cli.serve import ServeSubcommand
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser

if __name__ == "__main__":  # workers import this file
    ServeSubcommand.cmd(make_arg_parser(FlexibleArgumentParser()).parse_args())
