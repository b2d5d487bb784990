"""A client that retries until it knows: httpx, with a loop that can be read.

    python retrying_httpx.py http://127.0.0.1:8080 PREFIX COUNT [CLIENTS]

Sends COUNT orders, each with its key, from each of CLIENTS at once; prints what each was told, as JSON.
"""

import asyncio
import json
import random
import sys

import httpx

ATTEMPTS_MAX = 30

# What says "not known" or "not now". Everything else is definite: 201, and 400, 413 or 422 as well.
AGAIN = (409, 425, 429, 500, 502, 503, 504)


async def send(http, key, order):
    """One intent: the same key and the same bytes, however often."""
    content = json.dumps(order, separators=(",", ":")).encode()
    headers = {"Content-Type": "application/json", "Idempotency-Key": f'"{key}"'}
    for attempt in range(1, ATTEMPTS_MAX + 1):
        try:
            answer = await http.post("/orders", content=content, headers=headers)
        except httpx.TransportError:
            # Refused, reset, timed out, or broken off in the body: it may have happened, and the key makes asking safe.
            if attempt == ATTEMPTS_MAX:
                raise
            await asyncio.sleep(pause(attempt))
            continue
        if answer.status_code not in AGAIN or attempt == ATTEMPTS_MAX:
            return {
                "key": key,
                "status": answer.status_code,
                "body": answer.content.decode(),
                "attempts": attempt,
                "replayed": answer.headers.get("Idempotency-Replayed") == "true",
            }
        await asyncio.sleep(pause(attempt, answer.headers.get("Retry-After")))


def pause(attempt, retry_after=None):
    if retry_after and retry_after.isdigit():
        return int(retry_after)
    # Full jitter: clients that failed together must not come back in step.
    return random.uniform(0, min(1, 0.05 * 2**attempt))


async def client(url, prefix, count):
    async with httpx.AsyncClient(base_url=url, timeout=httpx.Timeout(30, connect=5)) as http:
        orders = [(f"{prefix}-{n}", {"customer": f"{prefix}-{n}", "amount": 100 + n}) for n in range(count)]
        return [await send(http, key, order) for key, order in orders]


async def main():
    url, prefix, count = sys.argv[1], sys.argv[2], int(sys.argv[3])
    clients = int(sys.argv[4]) if len(sys.argv) > 4 else 1
    told = await asyncio.gather(*(client(url, prefix, count) for _ in range(clients)))
    print(json.dumps([answer for answers in told for answer in answers], indent=1))


if __name__ == "__main__":
    asyncio.run(main())
