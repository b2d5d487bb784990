# make up: everything on this machine. make test: every test. make bench: the ratios. make check: linters.

.PHONY: up build setup lint check test test-messages test-matrix test-pgbouncer bench

# The demo runs until Ctrl-C; DATABASE_URL uses your own PostgreSQL in place of a private one.
# With a nats-server its messages go through a broker; without one, straight from outbox to inbox.
up: build
	@scripts/setup.sh 'nats?'
	target/release/pgonce up --demo

build:
	@scripts/setup.sh rust
	cargo build --release --locked -p pgonce-cli

setup:
	@scripts/setup.sh rust postgresql languages redis $(if $(filter-out 0,$(SKIP_BROKERS)),,nats rabbitmq kafka)

lint:
	@scripts/setup.sh rust
	cargo fmt --all --check
	cargo clippy --workspace --all-targets --all-features --locked -- -D warnings

check: lint
	@scripts/setup.sh cargo-deny
	cargo deny --all-features check bans licenses sources
	@cargo deny --all-features check advisories || { \
	  echo "advisories were not checked, or found something: see above (OFFLINE=1 goes on without them)"; test -n "$$OFFLINE"; }

# SKIP_BROKERS=1 leaves out what needs NATS, RabbitMQ and Kafka; KAFKA_BOOTSTRAP=host:port names a Kafka that runs.
test: setup
	cargo test --workspace --all-features --locked
	@case "$(SKIP_BROKERS)" in ""|0) ;; *) echo "SKIPPED: brokers (NATS, RabbitMQ, Kafka), as SKIP_BROKERS says" ;; esac

# A hundred thousand messages from one service to another while everything is killed in turn: some minutes.
test-messages: setup
	PGONCE_TEST_MESSAGES=100000 cargo test --locked -p pgonce-cli --all-features --test messages -- two_services

# The suite on each supported version of PostgreSQL, then once through PgBouncer in transaction mode.
test-matrix: setup
	@scripts/test-matrix.sh 14 15 16 17 18
	@$(MAKE) test-pgbouncer

test-pgbouncer: setup
	@scripts/setup.sh pgbouncer
	PATH="$$PATH:/usr/sbin" PGONCE_TEST_PGBOUNCER=1 cargo test --locked -p pgonce-testkit -p pgonce-relay --all-features --test concurrency --test run --test contract --test batch --test inbox --test import --test queue --test call --test ledger --test outbox --test relay

bench: setup
	@scripts/setup.sh nginx
	cargo build --release --locked -p pgonce-cli
	cargo run --release --locked -p pgonce-bench
