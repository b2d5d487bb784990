-- What operators read; the tables are private.
CREATE OR REPLACE VIEW once_ledger.accounts WITH (security_barrier) AS
    SELECT a.id, a.tenant, a.account, a.currency, CASE a.side WHEN 1 THEN 'debit' ELSE 'credit' END AS side, a.balance,
        once_ledger.format_amount(a.balance, a.currency) AS amount, a.overdraft, a.entries, a.opened_at
    FROM once_ledger.account a;

CREATE OR REPLACE VIEW once_ledger.postings WITH (security_barrier) AS
    SELECT p.id, p.at, p.tenant, p.source, p.operation, p.description, o.source AS reverses_source, o.operation AS reverses_operation,
        b.source AS reversed_by_source, b.operation AS reversed_by_operation
    FROM once_ledger.posting p LEFT JOIN once_ledger.posting o ON o.id = p.reverses
        LEFT JOIN once_ledger.posting b ON b.reverses = p.id;

CREATE OR REPLACE VIEW once_ledger.entries WITH (security_barrier) AS
    SELECT e.posting_id, e.line, p.at, p.tenant, a.account, a.currency, e.number, e.amount, e.balance, p.source, p.operation, p.description
    FROM once_ledger.entry e JOIN once_ledger.posting p ON p.id = e.posting_id JOIN once_ledger.account a ON a.id = e.account_id;

CREATE OR REPLACE VIEW once_ledger.migrations AS
    SELECT m.version, m.name, m.checksum, m.breaking, m.applied_at, m.applied_by FROM once_ledger.migration m;
