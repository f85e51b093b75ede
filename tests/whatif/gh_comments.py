"""A stand-in for GitHub's command `gh api` with the comments of one pull request, in comments.json of
$RUNNER_TEMP; without that file every call fails as one without the permission does."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

OWN = '.[] | select(.user.type == "Bot" and (.body | startswith(env.MARKER))) | .id'
COMMENTS = "repos/someone/some-where/issues/7/comments"


def main(words: list[str]) -> int:
    """Run `gh WORDS`; the exit status."""
    store = Path(os.environ["RUNNER_TEMP"]) / "comments.json"
    if not store.exists() or os.environ["GH_TOKEN"] != "t0ken":
        print("gh: Resource not accessible by integration (HTTP 403)", file=sys.stderr)
        return 1
    comments = json.loads(store.read_text())
    if words == ["api", "--paginate", f"{COMMENTS}?per_page=100", "--jq", OWN]:
        marker = os.environ["MARKER"]
        for comment in comments:
            if comment["user"]["type"] == "Bot" and comment["body"].startswith(marker):
                print(comment["id"])
        return 0
    api, silent, flag, method, path, field, value = words
    assert (api, silent, flag, field) == ("api", "--silent", "--method", "-F")
    assert value.startswith("body=@")
    body = Path(value.removeprefix("body=@")).read_text()
    if (method, path) == ("POST", COMMENTS):
        comments.append({"id": 100 + len(comments), "user": {"type": "Bot"}, "body": body})
    else:
        assert method == "PATCH"
        (known,) = (
            c for c in comments if path == f"repos/someone/some-where/issues/comments/{c['id']}"
        )
        known["body"] = body
    store.write_text(json.dumps(comments))
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
