// Orders creates an order once, however often and by however many it is asked for: pgx v5.
//
//	DATABASE_URL=postgres://… go run . KEY CUSTOMER AMOUNT
//	DATABASE_URL=postgres://… go run . --self-test
package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
)

const (
	attemptsMax        = 8
	backoffMax         = 500 * time.Millisecond
	resolveAttemptsMax = 6
	resolveTimeout     = 30 * time.Second
	creditLimit        = 100_000
)

var (
	// ErrConflict: the key was used before with another payload. HTTP: 422.
	ErrConflict = errors.New("the key was used before with another payload")
	// ErrNeedsSettling: the effect may be there or not. A person settles it (pgonce intents settle).
	ErrNeedsSettling = errors.New("the outcome is not known")
	// ErrResultExpired: it was done, but the answer is kept no longer.
	ErrResultExpired = errors.New("done, but the answer is kept no longer")
	// ErrLeaseLost: somebody took the work over; what this caller did in its transaction was rolled back.
	ErrLeaseLost = errors.New("the claim was taken over")
	// ErrInDoubt: COMMIT was sent and not answered; it may have happened.
	ErrInDoubt = errors.New("COMMIT was not answered")

	// It did not happen, and never will: run the transaction again.
	errRolledBack = errors.New("the connection was lost and the transaction rolled back")
)

// InProgress: somebody is at it; ask again, with the same key, after RetryAfter. HTTP: 409 with Retry-After.
type InProgress struct{ RetryAfter time.Duration }

func (e InProgress) Error() string { return fmt.Sprintf("in progress, again in %s", e.RetryAfter) }

// BusinessError: a rule said no. What an effect returns; nothing of the intent is recorded yet.
type BusinessError struct{ Code, Message string }

func (e BusinessError) Error() string { return e.Code + ": " + e.Message }

// Failed: the same no, recorded, now or by an earlier attempt. Every later attempt gets it.
type Failed struct{ Code, Message string }

func (e Failed) Error() string { return e.Code + ": " + e.Message }

// Request is what a client asks for.
type Request struct {
	Customer string `json:"customer"`
	Amount   int64  `json:"amount"`
}

// Order is what a client gets.
type Order struct {
	ID       string `json:"id"`
	Customer string `json:"customer"`
	Amount   int64  `json:"amount"`
}

// Claim is what this program reads of once.claim's row. Names that are NULL stay empty.
type Claim struct {
	Kind           string
	ClaimID        *string
	ResponseBody   []byte
	FailureCode    *string
	FailureMessage *string
	RetryAfterMs   *int64
}

// claimColumns are Claim's fields, in order.
const claimColumns = "kind, claim_id::text, response_body, failure_code, failure_message, retry_after_ms"

// setup is safe at every start: every statement changes nothing when there is nothing to change.
func setup(ctx context.Context, pool *pgxpool.Pool) error {
	for _, statement := range []string{
		`CREATE TABLE IF NOT EXISTS example_orders
			(id uuid PRIMARY KEY, customer text NOT NULL, amount bigint NOT NULL)`,
		`CREATE TABLE IF NOT EXISTS example_payments
			(provider_reference text NOT NULL, customer text NOT NULL, amount bigint NOT NULL)`,
		`SELECT once.define_scope(p_scope => 'create_order', p_policy => '{"retention": "30d", "waiters_max": 32}')`,
		// The provider gets our key and deduplicates by it, so asking it again is safe: stale = rerun.
		`SELECT once.define_scope(p_scope => 'charge_card',
			p_policy => '{"mode": "leased", "lease": "30s", "stale": "rerun", "retention": "30d"}')`,
	} {
		if _, err := pool.Exec(ctx, statement); err != nil {
			return err
		}
	}
	return nil
}

// --- atomic: claim, effect and outcome in one transaction -----------------------------------------------------

// CreateOrder returns the answer's bytes: of this execution, or the stored ones of the first.
// After any error that is not described above, calling again with the same key is safe.
func CreateOrder(ctx context.Context, pool *pgxpool.Pool, key string, request Request) ([]byte, error) {
	body, err := retrying(ctx, func() ([]byte, error) { return createOrderAttempt(ctx, pool, key, request) })
	if refusal := (BusinessError{}); errors.As(err, &refusal) {
		// The effect is rolled back by now, and a failure noted in that transaction would be gone with it:
		// it is recorded in one of its own.
		return retrying(ctx, func() ([]byte, error) { return recordFailure(ctx, pool, key, request, refusal) })
	}
	return body, err
}

func createOrderAttempt(ctx context.Context, pool *pgxpool.Pool, key string, request Request) ([]byte, error) {
	var found Claim
	var body []byte
	err := transaction(ctx, pool, func(tx pgx.Tx) (err error) {
		if found, err = claim(ctx, tx, "create_order", key, request, nil); err != nil {
			return err
		}
		if found.ClaimID == nil {
			body, err = observed(found)
			return err
		}
		order, err := insertOrder(ctx, tx, request)
		if err != nil {
			return err
		}
		if body, err = json.Marshal(order); err != nil {
			return err
		}
		return succeed(ctx, tx, "create_order", key, *found.ClaimID, body, "order", order.ID)
	})
	// In doubt without a claim: only the end of a look was lost, and it changed nothing.
	if errors.Is(err, ErrInDoubt) && found.ClaimID != nil {
		done, resolveErr := resolve(ctx, pool, "create_order", key, *found.ClaimID)
		switch {
		case resolveErr != nil:
			return nil, resolveErr
		case done == nil: // a scope that keeps its rows for less than a minute cannot tell
			return nil, err
		case *done:
			return body, nil
		}
		return nil, errRolledBack
	}
	if err != nil {
		return nil, err
	}
	return body, nil
}

// insertOrder is the effect. It knows nothing of idempotency.
func insertOrder(ctx context.Context, tx pgx.Tx, request Request) (Order, error) {
	order := Order{Customer: request.Customer, Amount: request.Amount}
	err := tx.QueryRow(ctx,
		"INSERT INTO example_orders (id, customer, amount) VALUES (gen_random_uuid(), $1, $2) RETURNING id::text",
		request.Customer, request.Amount).Scan(&order.ID)
	if err != nil {
		return order, err
	}
	var owed int64
	err = tx.QueryRow(ctx, "SELECT sum(amount)::bigint FROM example_orders WHERE customer = $1", request.Customer).
		Scan(&owed)
	if err == nil && owed > creditLimit {
		err = BusinessError{"credit_exceeded", fmt.Sprintf("the limit is %d", creditLimit)}
	}
	return order, err
}

func recordFailure(
	ctx context.Context, pool *pgxpool.Pool, key string, request Request, refusal BusinessError,
) ([]byte, error) {
	payload, err := json.Marshal(request)
	if err != nil {
		return nil, err
	}
	var found Claim
	err = transaction(ctx, pool, func(tx pgx.Tx) (err error) {
		found, err = scanClaim(tx.Query(ctx, "SELECT "+claimColumns+` FROM once.record_failure(p_scope => 'create_order',
			p_key => $1, p_fingerprint => once.fingerprint($2::jsonb), p_retryable => false, p_code => $3, p_message => $4)`,
			key, payload, refusal.Code, refusal.Message))
		return err
	})
	if err != nil {
		return nil, err
	}
	if found.ClaimID != nil {
		return nil, Failed(refusal)
	}
	// Between our rollback and this call another attempt settled the intent: its outcome is the outcome.
	return observed(found)
}

// --- leased: work that cannot live in one transaction ---------------------------------------------------------

// Renew extends the lease and returns its new end. To be called well before the old one; ErrLeaseLost: too late.
type Renew func() (time.Time, error)

// Provider charges, and returns the provider's reference.
type Provider func(key string, request Request, renew Renew) (string, error)

// ChargeCard charges through the provider.
//
// The claim commits before the provider is called. The payment's row commits with the outcome, fenced: an owner
// that was paused for longer than its lease cannot write over whoever took over. What the fence does not cover
// is the call itself: the provider may be called twice, so it must take our key.
func ChargeCard(
	ctx context.Context, pool *pgxpool.Pool, key string, request Request, provider Provider, lease time.Duration,
) ([]byte, error) {
	var found Claim
	err := transaction(ctx, pool, func(tx pgx.Tx) (err error) {
		found, err = claim(ctx, tx, "charge_card", key, request, &lease)
		return err
	})
	if err != nil {
		return nil, err
	}
	if found.ClaimID == nil {
		return observed(found)
	}
	claimID := *found.ClaimID
	renew := func() (until time.Time, err error) {
		err = fenced(ctx, pool, func(tx pgx.Tx) error {
			return tx.QueryRow(ctx,
				"SELECT once.renew(p_scope => 'charge_card', p_key => $1, p_claim_id => $2, p_lease => $3::interval)",
				key, claimID, lease).Scan(&until)
		})
		return until, err
	}
	reference, err := provider(key, request, renew)
	if refusal := (BusinessError{}); errors.As(err, &refusal) {
		err = fenced(ctx, pool, func(tx pgx.Tx) error {
			_, err := tx.Exec(ctx, `SELECT once.fail(p_scope => 'charge_card', p_key => $1, p_claim_id => $2,
				p_retryable => false, p_code => $3, p_message => $4)`, key, claimID, refusal.Code, refusal.Message)
			return err
		})
		if err == nil {
			err = Failed(refusal)
		}
		return nil, err
	}
	if err != nil {
		// Only a definite no is recorded. After a timeout the claim is left alone: we do not know, and when the
		// lease ends the scope's policy decides.
		return nil, err
	}
	return completeCharge(ctx, pool, key, request, claimID, reference)
}

func completeCharge(
	ctx context.Context, pool *pgxpool.Pool, key string, request Request, claimID, reference string,
) ([]byte, error) {
	body, err := json.Marshal(map[string]string{"reference": reference})
	if err != nil {
		return nil, err
	}
	_, err = retrying(ctx, func() ([]byte, error) {
		return nil, fenced(ctx, pool, func(tx pgx.Tx) error {
			_, err := tx.Exec(ctx,
				"INSERT INTO example_payments (provider_reference, customer, amount) VALUES ($1, $2, $3)",
				reference, request.Customer, request.Amount)
			if err != nil {
				return err
			}
			return succeed(ctx, tx, "charge_card", key, claimID, body, "payment", reference)
		})
	})
	if errors.Is(err, ErrInDoubt) {
		done, resolveErr := resolve(ctx, pool, "charge_card", key, claimID)
		switch {
		case resolveErr != nil:
			return nil, resolveErr
		case done == nil: // our completion may still be on its way; the next call with this key will know
			return nil, InProgress{time.Second}
		case !*done:
			return nil, ErrLeaseLost
		}
		return body, nil
	}
	if err != nil {
		return nil, err
	}
	return body, nil
}

// fenced is a transaction that says ErrLeaseLost where succeed, fail or renew say that the claim is not ours any more.
func fenced(ctx context.Context, pool *pgxpool.Pool, work func(pgx.Tx) error) error {
	err := transaction(ctx, pool, work)
	if slices.Contains([]string{"P4010", "P4011", "P4012"}, sqlstate(err)) {
		return errors.Join(ErrLeaseLost, err)
	}
	return err
}

// --- the calls, thin --------------------------------------------------------------------------------------------

func claim(ctx context.Context, tx pgx.Tx, scope, key string, request Request, lease *time.Duration) (Claim, error) {
	payload, err := json.Marshal(request)
	if err != nil {
		return Claim{}, err
	}
	found, err := scanClaim(tx.Query(ctx, "SELECT "+claimColumns+` FROM once.claim(p_scope => $1, p_key => $2,
		p_fingerprint => once.fingerprint($3::jsonb), p_lease => $4::interval)`, scope, key, payload, lease))
	if sqlstate(err) == "P4002" {
		return found, errors.Join(ErrConflict, err)
	}
	return found, err
}

func scanClaim(rows pgx.Rows, err error) (Claim, error) {
	if err != nil {
		return Claim{}, err
	}
	return pgx.CollectExactlyOneRow(rows, pgx.RowToStructByPos[Claim])
}

func succeed(
	ctx context.Context, tx pgx.Tx, scope, key, claimID string, body []byte, resultType, resultID string,
) error {
	_, err := tx.Exec(ctx, `SELECT once.succeed(p_scope => $1, p_key => $2, p_claim_id => $3, p_response_body => $4,
		p_response_code => 201, p_result_type => $5, p_result_id => $6)`, scope, key, claimID, body, resultType, resultID)
	return err
}

// observed is the answer of an intent that is not ours to run: a claim without a claim id.
func observed(found Claim) ([]byte, error) {
	switch found.Kind {
	case "replay_success":
		return found.ResponseBody, nil
	case "final_failure":
		return nil, Failed{orEmpty(found.FailureCode), orEmpty(found.FailureMessage)}
	case "processing_active":
		return nil, InProgress{time.Duration(*found.RetryAfterMs) * time.Millisecond}
	case "uncertain":
		return nil, ErrNeedsSettling
	case "result_expired":
		return nil, ErrResultExpired
	}
	return nil, fmt.Errorf("a kind of claim that this program does not know: %s", found.Kind)
}

func orEmpty(text *string) string {
	if text == nil {
		return ""
	}
	return *text
}

// transaction runs work in one transaction. ErrInDoubt: COMMIT was sent, and what became of it is not known.
func transaction(ctx context.Context, pool *pgxpool.Pool, work func(pgx.Tx) error) error {
	tx, err := pool.Begin(ctx)
	if err != nil {
		return err
	}
	// Does nothing after a commit. Not under ctx: a caller who gave up still wants the rollback, and the
	// connection back.
	defer func() { _ = tx.Rollback(context.WithoutCancel(ctx)) }()
	if err := work(tx); err != nil {
		return err
	}
	return commit(ctx, tx)
}

// commit returns nil after a real COMMIT only. To the COMMIT of an aborted transaction PostgreSQL answers ROLLBACK
// without an error. Tx.Commit looks at that answer and returns pgx.ErrTxCommitRollback; Exec(ctx, "COMMIT") on a
// connection does not, so a transaction that was begun by hand must read the command tag itself.
func commit(ctx context.Context, tx pgx.Tx) error {
	err := tx.Commit(ctx)
	if err == nil || errors.Is(err, pgx.ErrTxCommitRollback) {
		return err
	}
	// Without a SQLSTATE the connection broke, or ctx ended while we waited. pgconn.SafeToRetry must not be asked: it
	// is true here after the server has committed and only the answer was lost (pgx 5.11.0, and the self-test). 57P01
	// and its like: the server may say that it stops after it has committed. Anything else that the server says is
	// certain: not committed.
	code := sqlstate(err)
	if code == "" || strings.HasPrefix(code, "08") || strings.HasPrefix(code, "57P0") || code == "40003" {
		return errors.Join(ErrInDoubt, err)
	}
	return err
}

// resolve asks the intent's row what became of a COMMIT that was not answered: true, false, or nil (cannot tell).
//
// Over a new connection: those that wait in the pool may be as dead as the one that was lost. And not under ctx
// alone: where its end is the reason for the doubt, nothing could be asked under it.
func resolve(ctx context.Context, pool *pgxpool.Pool, scope, key, claimID string) (done *bool, err error) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), resolveTimeout)
	defer cancel()
	for attempt := 1; ; attempt++ {
		done, err = resolveOnce(ctx, pool.Config().ConnConfig, scope, key, claimID)
		if err == nil {
			return done, nil
		}
		// 55P03: the lost transaction is still open. Or the server is still away (a restart, a failover).
		if attempt == resolveAttemptsMax || ctx.Err() != nil {
			return nil, errors.Join(ErrInDoubt, err)
		}
		backOff(ctx, attempt)
	}
}

func resolveOnce(ctx context.Context, config *pgx.ConnConfig, scope, key, claimID string) (done *bool, err error) {
	conn, err := pgx.ConnectConfig(ctx, config)
	if err != nil {
		return nil, err
	}
	defer conn.Close(ctx)
	err = conn.QueryRow(ctx, "SELECT once.resolve(p_scope => $1, p_key => $2, p_claim_id => $3)", scope, key, claimID).
		Scan(&done)
	return done, err
}

// retrying runs a whole transaction again after a serialization failure or a deadlock, a bounded number of times.
// The whole of it, from the claim on: after 40001 another attempt may have won, and only a new claim sees it.
func retrying(ctx context.Context, work func() ([]byte, error)) ([]byte, error) {
	for attempt := 1; ; attempt++ {
		result, err := work()
		again := errors.Is(err, errRolledBack) || sqlstate(err) == "40001" || sqlstate(err) == "40P01"
		if !again || attempt == attemptsMax || ctx.Err() != nil {
			return result, err
		}
		backOff(ctx, attempt)
	}
}

// backOff waits with full jitter: rivals that collided once must not come back in step.
func backOff(ctx context.Context, attempt int) {
	limit := min(backoffMax, 10*time.Millisecond<<attempt)
	select {
	case <-time.After(rand.N(limit)):
	case <-ctx.Done():
	}
}

func sqlstate(err error) string {
	var fromServer *pgconn.PgError
	if errors.As(err, &fromServer) {
		return fromServer.Code
	}
	return ""
}

// connect opens a pool. Behind PgBouncer before 1.21 in transaction mode, add default_query_exec_mode=exec to the URL.
func connect(ctx context.Context, url string, size int32) (*pgxpool.Pool, error) {
	config, err := pgxpool.ParseConfig(url)
	if err != nil {
		return nil, err
	}
	config.MaxConns = size
	return pgxpool.NewWithConfig(ctx, config)
}

func run(ctx context.Context, args []string) error {
	url := os.Getenv("DATABASE_URL")
	if url == "" {
		return errors.New("DATABASE_URL is not set: start a database with `pgonce up`, which prints it")
	}
	if len(args) > 0 && (args[0] == "--self-test" || args[0] == "--crash-after-insert") {
		return selfTest(ctx, url, args)
	}
	if len(args) != 3 {
		return errors.New("usage: go run . KEY CUSTOMER AMOUNT | go run . --self-test")
	}
	amount, err := strconv.ParseInt(args[2], 10, 64)
	if err != nil {
		return err
	}
	pool, err := connect(ctx, url, 1)
	if err != nil {
		return err
	}
	defer pool.Close()
	if err := setup(ctx, pool); err != nil {
		return err
	}
	answer, err := CreateOrder(ctx, pool, args[0], Request{args[1], amount})
	if err != nil {
		return err
	}
	fmt.Println(string(answer))
	return nil
}

func main() {
	if err := run(context.Background(), os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}
