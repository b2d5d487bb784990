"""A client that retries until it knows: requests, with the retries of urllib3.

    python retrying_requests.py http://127.0.0.1:8080 PREFIX COUNT [CLIENTS]

Sends COUNT orders, each with its key, from each of CLIENTS at once; prints what each was told, as JSON.
"""

import json
import sys
from concurrent.futures import ThreadPoolExecutor

import requests
from requests.adapters import HTTPAdapter
from urllib3.util import Retry

ATTEMPTS_MAX = 30

# What says "not known" or "not now". Everything else is definite: 201, and 400, 413 or 422 as well.
AGAIN = [409, 425, 429, 500, 502, 503, 504]


def session():
    retry = Retry(
        total=ATTEMPTS_MAX - 1,
        status_forcelist=AGAIN,
        # POST is not in the default list, with good reason: only the key makes repeating it safe.
        allowed_methods={"POST"},
        # Where the answer says how long to wait, that long; else longer each time, and not in step with others.
        respect_retry_after_header=True,
        backoff_factor=0.05,
        backoff_max=1,
        backoff_jitter=0.2,
        # The last answer, whatever it says, in place of an exception.
        raise_on_status=False,
    )
    session = requests.Session()
    session.mount("http://", HTTPAdapter(max_retries=retry))
    session.mount("https://", HTTPAdapter(max_retries=retry))
    return session


def send(session, url, key, order):
    """One intent: the same key and the same bytes, however often."""
    attempts = 0
    while True:
        answer = session.post(
            f"{url}/orders",
            data=json.dumps(order, separators=(",", ":")),
            headers={"Content-Type": "application/json", "Idempotency-Key": f'"{key}"'},
            timeout=(5, 30),
            stream=True,
        )
        attempts += len(answer.raw.retries.history) + 1
        try:
            body = answer.content
            break
        except requests.exceptions.ChunkedEncodingError:
            # The body broke off. urllib3 is done when it has the head of a response: from there on it is up to us.
            if attempts >= ATTEMPTS_MAX:
                raise
    return {
        "key": key,
        "status": answer.status_code,
        "body": body.decode(),
        "attempts": attempts,
        "replayed": answer.headers.get("Idempotency-Replayed") == "true",
    }


def client(url, prefix, count):
    with session() as http:
        orders = [(f"{prefix}-{n}", {"customer": f"{prefix}-{n}", "amount": 100 + n}) for n in range(count)]
        return [send(http, url, key, order) for key, order in orders]


def main():
    url, prefix, count = sys.argv[1], sys.argv[2], int(sys.argv[3])
    clients = int(sys.argv[4]) if len(sys.argv) > 4 else 1
    with ThreadPoolExecutor(clients) as threads:
        told = threads.map(lambda _: client(url, prefix, count), range(clients))
        print(json.dumps([answer for answers in told for answer in answers], indent=1))


if __name__ == "__main__":
    main()
