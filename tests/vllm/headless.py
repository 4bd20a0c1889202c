"""python tests/vllm/headless.py OPTION...: a node of vLLM without a server, as by the command
`vllm serve --headless`, which does not start in the CPU build."""

from __future__ import annotations

from vllm.entrypoints.cli.serve import run_headless
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser

if __name__ == "__main__":  # its workers import this file
    options = make_arg_parser(FlexibleArgumentParser()).parse_args()
    options.api_server_count = 0
    run_headless(options)
