package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
)

const callers = 20

var tests = []struct {
	name string
	run  func(context.Context, *pgxpool.Pool) error
}{
	{"sequential duplicates", sequentialDuplicates},
	{"twenty callers at once", twentyCallersAtOnce},
	{"same key, other payload", sameKeyOtherPayload},
	{"crash after the business write", crashAfterTheBusinessWrite},
	{"business failure is final", businessFailureIsFinal},
	{"commit of an aborted transaction", commitOfAnAbortedTransaction},
	{"commit lost on the way", commitLostOnTheWay},
	{"answer to commit lost", answerToCommitLost},
	{"lease is held and renewed", leaseIsHeldAndRenewed},
	{"stale owner is fenced", staleOwnerIsFenced},
}

// selfTest tries what orders.go promises against a real database.
func selfTest(ctx context.Context, url string, args []string) error {
	if args[0] == "--crash-after-insert" {
		return crashAfterInsert(ctx, url, args[1], args[2])
	}
	pool, err := connect(ctx, url, callers)
	if err != nil {
		return err
	}
	defer pool.Close()
	if err := setup(ctx, pool); err != nil {
		return err
	}
	passed, failed := 0, 0
	for _, test := range tests {
		if err := test.run(ctx, pool); err != nil {
			failed++
			fmt.Fprintf(os.Stderr, "%s: %v\n", test.name, err)
		} else {
			passed++
		}
	}
	fmt.Printf("%d passed, %d failed\n", passed, failed)
	if failed > 0 {
		return errors.New("the self-test failed")
	}
	return nil
}

// fresh is a key and a request of the test's own; the customer's name finds its rows.
func fresh(ctx context.Context, pool *pgxpool.Pool, amount int64) (string, Request) {
	var name string
	if err := pool.QueryRow(ctx, "SELECT gen_random_uuid()::text").Scan(&name); err != nil {
		panic(err)
	}
	return "checkout-" + name, Request{name, amount}
}

func expectRows(ctx context.Context, pool *pgxpool.Pool, table string, request Request, want int) error {
	var rows int
	err := pool.QueryRow(ctx, "SELECT count(*) FROM "+table+" WHERE customer = $1", request.Customer).Scan(&rows)
	if err == nil && rows != want {
		err = fmt.Errorf("%d rows in %s, expected %d", rows, table, want)
	}
	return err
}

// expectAnswer makes the call again and compares.
func expectAnswer(ctx context.Context, pool *pgxpool.Pool, key string, request Request, want []byte) error {
	answer, err := CreateOrder(ctx, pool, key, request)
	if err == nil && !bytes.Equal(answer, want) {
		err = fmt.Errorf("answered %s, expected %s", answer, want)
	}
	return err
}

// asAClient does what a client does that is told to come again.
func asAClient(call func() ([]byte, error)) ([]byte, error) {
	deadline := time.Now().Add(30 * time.Second)
	for {
		answer, err := call()
		var busy InProgress
		if !errors.As(err, &busy) || time.Now().After(deadline) {
			return answer, err
		}
		time.Sleep(min(busy.RetryAfter, 200*time.Millisecond))
	}
}

func sequentialDuplicates(ctx context.Context, pool *pgxpool.Pool) error {
	key, request := fresh(ctx, pool, 1999)
	first, err := CreateOrder(ctx, pool, key, request)
	if err != nil {
		return err
	}
	return errors.Join(
		expectAnswer(ctx, pool, key, request, first),
		expectRows(ctx, pool, "example_orders", request, 1))
}

func twentyCallersAtOnce(ctx context.Context, pool *pgxpool.Pool) error {
	key, request := fresh(ctx, pool, 1999)
	var answers [callers][]byte
	var failures [callers]error
	var start, done sync.WaitGroup
	start.Add(1)
	for i := range callers {
		done.Go(func() {
			start.Wait()
			answers[i], failures[i] = asAClient(func() ([]byte, error) { return CreateOrder(ctx, pool, key, request) })
		})
	}
	start.Done()
	done.Wait()
	for i, answer := range answers {
		if failures[i] == nil && !bytes.Equal(answer, answers[0]) {
			failures[i] = fmt.Errorf("different answers: %s and %s", answers[0], answer)
		}
	}
	return errors.Join(errors.Join(failures[:]...), expectRows(ctx, pool, "example_orders", request, 1))
}

func sameKeyOtherPayload(ctx context.Context, pool *pgxpool.Pool) error {
	key, request := fresh(ctx, pool, 1999)
	first, err := CreateOrder(ctx, pool, key, request)
	if err != nil {
		return err
	}
	_, other := fresh(ctx, pool, 5)
	if answer, err := CreateOrder(ctx, pool, key, other); !errors.Is(err, ErrConflict) {
		return fmt.Errorf("expected a conflict, got %s and %w", answer, err)
	}
	return errors.Join(
		expectRows(ctx, pool, "example_orders", other, 0),
		expectAnswer(ctx, pool, key, request, first))
}

func crashAfterTheBusinessWrite(ctx context.Context, pool *pgxpool.Pool) error {
	key, request := fresh(ctx, pool, 1999)
	self, err := os.Executable()
	if err != nil {
		return err
	}
	child := exec.CommandContext(ctx, self, "--crash-after-insert", key, request.Customer)
	child.Stderr = os.Stderr
	said, err := child.Output()
	status, _ := child.ProcessState.Sys().(syscall.WaitStatus)
	if status.Signal() != syscall.SIGKILL || string(said) != "inserted\n" {
		return fmt.Errorf("the crash did not happen: %q, %w", said, err)
	}
	if err := expectRows(ctx, pool, "example_orders", request, 0); err != nil {
		return err
	}
	answer, err := asAClient(func() ([]byte, error) { return CreateOrder(ctx, pool, key, request) })
	if err != nil {
		return err
	}
	return errors.Join(
		expectAnswer(ctx, pool, key, request, answer),
		expectRows(ctx, pool, "example_orders", request, 1))
}

func crashAfterInsert(ctx context.Context, url, key, customer string) error {
	conn, err := pgx.Connect(ctx, url)
	if err != nil {
		return err
	}
	tx, err := conn.Begin(ctx)
	if err != nil {
		return err
	}
	request := Request{customer, 1999}
	if found, err := claim(ctx, tx, "create_order", key, request, nil); err != nil || found.Kind != "new_claim" {
		return fmt.Errorf("expected a new claim, got %s and %w", found.Kind, err)
	}
	if _, err := insertOrder(ctx, tx, request); err != nil {
		return err
	}
	fmt.Println("inserted")
	if err := syscall.Kill(os.Getpid(), syscall.SIGKILL); err != nil {
		return err
	}
	select {} // the signal may reach another thread first
}

func businessFailureIsFinal(ctx context.Context, pool *pgxpool.Pool) error {
	key, request := fresh(ctx, pool, creditLimit+1)
	for range 2 {
		_, err := CreateOrder(ctx, pool, key, request)
		var failure Failed
		if !errors.As(err, &failure) || failure.Code != "credit_exceeded" || !strings.Contains(failure.Message, "limit") {
			return fmt.Errorf("expected credit_exceeded, got %w", err)
		}
		if err := expectRows(ctx, pool, "example_orders", request, 0); err != nil {
			return err
		}
	}
	return transaction(ctx, pool, func(tx pgx.Tx) error {
		found, err := claim(ctx, tx, "create_order", key, request, nil)
		if err == nil && found.Kind != "final_failure" {
			err = fmt.Errorf("not recorded: %s", found.Kind)
		}
		return err
	})
}

func commitOfAnAbortedTransaction(ctx context.Context, pool *pgxpool.Pool) error {
	err := transaction(ctx, pool, func(tx pgx.Tx) error {
		_, _ = tx.Exec(ctx, "SELECT 1/0") // an effect that swallows its error
		return nil
	})
	if !errors.Is(err, pgx.ErrTxCommitRollback) {
		return fmt.Errorf("expected that the rollback is noticed, got %w", err)
	}
	return nil
}

func commitLostOnTheWay(ctx context.Context, pool *pgxpool.Pool) error {
	return commitLost(ctx, pool, false)
}
func answerToCommitLost(ctx context.Context, pool *pgxpool.Pool) error {
	return commitLost(ctx, pool, true)
}

func commitLost(ctx context.Context, pool *pgxpool.Pool, answerOnly bool) error {
	key, request := fresh(ctx, pool, 1999)
	config := pool.Config()
	upstream := config.ConnConfig.Config
	wire := &commitCutter{answerOnly: answerOnly}
	// In place of dialling the server: a connection that breaks. It reads the protocol in the clear, so no TLS.
	config.MaxConns, config.ConnConfig.TLSConfig, config.ConnConfig.Fallbacks = 1, nil, nil
	config.ConnConfig.DialFunc = func(ctx context.Context, _, _ string) (net.Conn, error) {
		network, address := pgconn.NetworkAddress(upstream.Host, upstream.Port)
		conn, err := (&net.Dialer{}).DialContext(ctx, network, address)
		return &cutConn{Conn: conn, wire: wire}, err
	}
	cut, err := pgxpool.NewWithConfig(ctx, config)
	if err != nil {
		return err
	}
	defer cut.Close()
	answer, err := asAClient(func() ([]byte, error) { return CreateOrder(ctx, cut, key, request) })
	if err != nil {
		return err
	}
	if !wire.fired.Load() {
		return errors.New("nothing was cut")
	}
	return errors.Join(
		expectAnswer(ctx, pool, key, request, answer),
		expectRows(ctx, pool, "example_orders", request, 1))
}

// commitCutter breaks one connection: at the first COMMIT, before it leaves or before its answer comes back.
type commitCutter struct {
	answerOnly bool
	fired      atomic.Bool
}

type cutConn struct {
	net.Conn
	wire *commitCutter
	cut  atomic.Bool
}

func (c *cutConn) Write(data []byte) (int, error) {
	if bytes.Contains(bytes.ToLower(data), []byte("commit\x00")) && c.wire.fired.CompareAndSwap(false, true) {
		c.cut.Store(true)
		if !c.wire.answerOnly {
			c.Conn.Close()
			return len(data), nil // as a socket does: accepted, and lost on the way
		}
	}
	return c.Conn.Write(data)
}

func (c *cutConn) Read(data []byte) (int, error) {
	n, err := c.Conn.Read(data)
	if n > 0 && c.cut.Load() {
		// The answer is here, so the transaction is committed; the client never hears of it.
		c.Conn.Close()
		return 0, net.ErrClosed
	}
	return n, err
}

func leaseIsHeldAndRenewed(ctx context.Context, pool *pgxpool.Pool) error {
	key, request := fresh(ctx, pool, 1999)
	never := func(string, Request, Renew) (string, error) { return "", errors.New("ran a second time") }
	first, err := ChargeCard(ctx, pool, key, request, func(_ string, _ Request, renew Renew) (string, error) {
		var busy InProgress
		if _, err := ChargeCard(ctx, pool, key, request, never, time.Minute); !errors.As(err, &busy) || busy.RetryAfter <= 0 {
			return "", fmt.Errorf("expected in progress, got %w", err)
		}
		before, err := renew()
		if err != nil {
			return "", err
		}
		after, err := renew()
		if err == nil && !after.After(before) {
			err = errors.New("the lease did not grow")
		}
		return "ref-1", err
	}, 30*time.Second)
	if err != nil {
		return err
	}
	again, err := ChargeCard(ctx, pool, key, request, never, time.Minute)
	if err == nil && !bytes.Equal(first, again) {
		err = errors.New("the replay has other bytes")
	}
	return errors.Join(err, expectRows(ctx, pool, "example_payments", request, 1))
}

func staleOwnerIsFenced(ctx context.Context, pool *pgxpool.Pool) error {
	key, request := fresh(ctx, pool, 1999)
	second := func(string, Request, Renew) (string, error) { return "ref-of-the-second", nil }
	var takeover []byte
	pausing := func(_ string, _ Request, renew Renew) (_ string, err error) {
		// Paused past its lease: meanwhile another caller keeps asking until it may take over.
		takeover, err = asAClient(func() ([]byte, error) { return ChargeCard(ctx, pool, key, request, second, time.Minute) })
		if err != nil {
			return "", err
		}
		if _, err := renew(); !errors.Is(err, ErrLeaseLost) {
			return "", fmt.Errorf("expected that the lease is lost, got %w", err)
		}
		return "ref-of-the-first", nil
	}
	_, err := ChargeCard(ctx, pool, key, request, pausing, 50*time.Millisecond)
	if !errors.Is(err, ErrLeaseLost) || sqlstate(err) != "P4010" {
		return fmt.Errorf("expected P4010, got %w", err)
	}
	again, err := ChargeCard(ctx, pool, key, request, second, time.Minute)
	if err == nil && !bytes.Equal(again, takeover) {
		err = errors.New("the replay has other bytes")
	}
	return errors.Join(err, expectRows(ctx, pool, "example_payments", request, 1))
}
