#!/usr/bin/env bash
# Installs what is missing on a bare machine, where it may (root or password-less sudo); otherwise prints
# the exact command and fails. Usage: scripts/setup.sh
# rust|postgresql|languages|redis|nats|nats?|rabbitmq|kafka|pgbouncer|nginx|cargo-deny …
# A part with a question mark is welcome and not needed: installed where that works, quietly left out where not.
set -euo pipefail

as_root() {
  if [ "$(id -u)" = 0 ]; then "$@"
  elif command -v sudo >/dev/null && sudo -n true 2>/dev/null; then sudo -n "$@"
  else return 1; fi
}

install() { # install WHAT PACKAGE…
  local what=$1; shift
  echo "setup: installing $what ($*)" >&2
  if command -v apt-get >/dev/null && as_root true 2>/dev/null; then
    export DEBIAN_FRONTEND=noninteractive
    as_root apt-get update -qq && as_root apt-get install -y -qq "$@" >&2 && return 0
  fi
  echo "setup: $what is missing. Install it, for example:" >&2
  echo "    sudo apt-get install $*        (Debian, Ubuntu)" >&2
  echo "    brew install ${BREW:-$*}        (macOS)" >&2
  exit 1
}

# Installs a package that brings a service, and starts none: the suite runs its own. Debian asks policy-rc.d
# before it starts anything; a policy that is there already is the administrator's, and stays.
install_unstarted() ( # install_unstarted WHAT SERVICE PACKAGE…
  what=$1 service=$2 policy=/usr/sbin/policy-rc.d ours=; shift 2
  trap '[ -z "$ours" ] || as_root rm -f "$policy"' EXIT
  if command -v apt-get >/dev/null && as_root true 2>/dev/null && [ ! -e "$policy" ]; then
    ours=1
    printf '#!/bin/sh\nexit 101\n' | as_root tee "$policy" >/dev/null && as_root chmod 755 "$policy"
  fi
  install "$what" "$@"
  # Nor at the next boot.
  ! command -v systemctl >/dev/null || as_root systemctl disable --quiet "$service" 2>/dev/null || true
)

have_postgres() {
  [ -n "${PGONCE_PG_BIN:-}" ] && return 0
  command -v initdb >/dev/null && return 0
  for dir in /usr/lib/postgresql/*/bin /usr/pgsql-*/bin /opt/homebrew/opt/postgresql@*/bin /usr/local/opt/postgresql@*/bin; do
    [ -x "$dir/initdb" ] && return 0
  done
  return 1
}

have_nats() { command -v nats-server >/dev/null || [ -x /usr/sbin/nats-server ]; }

# Apache Kafka is plain jars: fetched once into the cache, where the suite looks for them.
fetch_kafka() {
  local list version jars
  [ -z "${KAFKA_BOOTSTRAP:-}" ] || return 0
  list=$(cd "$(dirname "$0")/../crates/pgonce-testkit/kafka" && pwd)
  version=$(cat "$list/VERSION")
  jars=${XDG_CACHE_HOME:-$HOME/.cache}/pgonce/kafka-$version
  command -v java >/dev/null || BREW=openjdk install "Java 17 or newer" default-jre-headless
  [ -e "$jars/complete" ] && return 0
  command -v mvn >/dev/null || BREW=maven install "Maven" maven
  echo "setup: fetching Kafka $version into $jars" >&2
  set -- mvn -B -q -f "$list/pom.xml" "-Dkafka=$version" -DincludeScope=runtime "-DoutputDirectory=$jars" \
    org.apache.maven.plugins:maven-dependency-plugin:3.6.1:copy-dependencies
  if ! "$@" >&2; then
    echo "setup: Kafka could not be fetched. Where a Maven repository is reachable, run:" >&2
    echo "    $* && touch $jars/complete" >&2
    echo "or name a broker that runs: KAFKA_BOOTSTRAP=host:port; or leave brokers out: SKIP_BROKERS=1" >&2
    exit 1
  fi
  touch "$jars/complete"
}

for part in "$@"; do
  case $part in
    rust)
      command -v cargo >/dev/null || { [ -x "$HOME/.cargo/bin/cargo" ] && echo "setup: add $HOME/.cargo/bin to PATH" >&2; }
      command -v cargo >/dev/null || { echo "setup: Rust 1.94 or newer is missing: install it with rustup" >&2; exit 1; }
      command -v cc >/dev/null || BREW=gcc install "a C linker" gcc libc6-dev ;;
    postgresql)
      # Binaries only: the suite runs its own private servers. A cluster of the distribution's is not wanted.
      if ! have_postgres; then
        if [ "$(id -u)" = 0 ] && [ ! -e /etc/postgresql-common/createcluster.conf ]; then
          mkdir -p /etc/postgresql-common && echo "create_main_cluster = false" > /etc/postgresql-common/createcluster.conf
        fi
        BREW=postgresql@17 install "PostgreSQL" postgresql postgresql-client
      fi
      command -v psql >/dev/null || ls /usr/lib/postgresql/*/bin/psql >/dev/null 2>&1 || BREW=libpq install "psql" postgresql-client ;;
    languages)
      skip=",${SKIP_EXAMPLES:-},"
      case $skip in *,python,*) ;; *) python3 -c 'import venv, ensurepip' 2>/dev/null || BREW=python install "Python with venv" python3 python3-venv ;; esac
      case $skip in *,node,*) ;; *) command -v npm >/dev/null || BREW=node install "Node.js" nodejs npm ;; esac
      case $skip in *,go,*) ;; *) command -v go >/dev/null || BREW=go install "Go" golang ;; esac ;;
    redis)
      command -v redis-server >/dev/null || BREW=redis install_unstarted "Redis" redis-server redis-server ;;
    nats\?)
      if ! have_nats && command -v apt-get >/dev/null && as_root true 2>/dev/null; then
        echo "setup: installing NATS, which the demo can do without" >&2
        # In a shell of its own: what fails there ends only that.
        "$0" nats >/dev/null 2>&1 || echo "setup: NATS could not be installed; going on without it" >&2
      fi ;;
    nats)
      have_nats ||
        BREW=nats-server install_unstarted "NATS" nats-server nats-server ;;
    rabbitmq)
      [ -x /usr/lib/rabbitmq/bin/rabbitmq-server ] || command -v rabbitmq-server >/dev/null ||
        BREW=rabbitmq install_unstarted "RabbitMQ" rabbitmq-server rabbitmq-server ;;
    kafka)
      fetch_kafka ;;
    pgbouncer)
      command -v pgbouncer >/dev/null || [ -x /usr/sbin/pgbouncer ] || install "PgBouncer" pgbouncer ;;
    nginx)
      # The peer of the HTTP bench. No service is to be started.
      command -v nginx >/dev/null || [ -x /usr/sbin/nginx ] || BREW=nginx install_unstarted "nginx" nginx nginx-light ;;
    cargo-deny)
      cargo deny --version >/dev/null 2>&1 || cargo install --locked cargo-deny ;;
    *) echo "setup: unknown part $part" >&2; exit 2 ;;
  esac
done
