"""Bring the local stack up and keep it until Ctrl-C (`make up`)."""

from __future__ import annotations

import argparse
import asyncio
import sys

from loadtest.processes import ProcessFailed, run_until_signal
from loadtest.redis_server import RedisNotFound
from loadtest.stack import Stack, StackFailed

GATEWAY_PORT = 8080
WATCH_INTERVAL_S = 1.0


def describe(stack: Stack) -> str:
    admin = f"-H 'Authorization: Bearer {stack.admin_key}' {stack.gateway_url}"
    instances = "\n".join(
        f"  vLLM server {instance.id}   {instance.url}   process {instance.pid}" for instance in stack.instances
    )
    return f"""
kvferry is up. Ctrl-C ends it.

  base URL        {stack.gateway_url}/v1
  API key         {stack.api_key}
  admin key       {stack.admin_key}
  model           {stack.model}
{instances}
  logs            {stack.log_directory}

A stream of 6,000 tokens, about a minute. Paste it into `.venv/bin/python`:

from openai import OpenAI
client = OpenAI(base_url="{stack.gateway_url}/v1", api_key="{stack.api_key}")
stream = client.chat.completions.create(
    model="{stack.model}", messages=[{{"role": "user", "content": "Tell me about the river."}}],
    max_tokens=6000, temperature=0, stream=True, extra_body={{"ignore_eos": True}},
)
for chunk in stream:
    print(chunk.choices[0].delta.content or "", end="", flush=True)

While it runs, from another terminal: what runs where, and a move. ID is in the first reply, and so is where the request
runs; move it to the other one, a or b:

export KVFERRY_URL={stack.gateway_url} KVFERRY_ADMIN_KEY={stack.admin_key}
.venv/bin/kvferry requests
.venv/bin/kvferry migrate ID b
.venv/bin/kvferry status --watch

The same with curl:

curl -s {admin.replace(stack.gateway_url, stack.gateway_url + "/admin/requests")}
curl -s {admin.replace(stack.gateway_url, stack.gateway_url + "/admin/instances")}
curl -s -X POST -H 'Content-Type: application/json' -d '{{"request": "ID", "destination": "b"}}' \\
  {admin.replace(stack.gateway_url, stack.gateway_url + "/admin/migrate")}
"""


async def keep_up(arguments: argparse.Namespace) -> int:
    try:
        async with Stack(instances=arguments.instances, policy=arguments.policy, gateway_port=arguments.port) as stack:
            print(describe(stack), flush=True)
            while True:
                stack.require_running()
                await asyncio.sleep(WATCH_INTERVAL_S)
    except (StackFailed, ProcessFailed, RedisNotFound) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    finally:
        print("everything is stopped", file=sys.stderr)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m loadtest.up", description=__doc__)
    parser.add_argument("--instances", type=int, default=2, metavar="N", help="vLLM servers (default 2)")
    parser.add_argument("--port", type=int, default=GATEWAY_PORT, help=f"the gateway's port (default {GATEWAY_PORT})")
    parser.add_argument(
        "--policy",
        choices=["none", "kvferry", "llumnix"],
        default="none",
        help="who moves requests: none, only you; kvferry or llumnix, the leader too (default none)",
    )
    return run_until_signal(keep_up(parser.parse_args()))


if __name__ == "__main__":
    sys.exit(main())
