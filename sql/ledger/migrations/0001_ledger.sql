-- The ledger: double entry for money-like effects. See docs/guides/ledger.md and docs/decisions/0010-ledger.md.

-- How many digits of an amount stand behind the point: ISO 4217, for display. Amounts are whole minor units everywhere.
CREATE TABLE once_ledger.currency (
    code   varchar(12) COLLATE "C" PRIMARY KEY CHECK (code ~ '^[A-Z0-9]{3,12}$'),
    digits smallint NOT NULL CHECK (digits BETWEEN 0 AND 18)
);
INSERT INTO once_ledger.currency (code, digits)
SELECT c.code, d.digits FROM (VALUES
    (0, 'BIF CLP DJF GNF ISK JPY KMF KRW PYG RWF UGX UYI VND VUV XAF XOF XPF'),
    (2, 'AED AFN ALL AMD ANG AOA ARS AUD AWG AZN BAM BBD BDT BGN BMD BND BOB BOV BRL BSD BTN BWP BYN BZD CAD CDF CHE CHF CHW '
        'CNY COP COU CRC CUP CVE CZK DKK DOP DZD EGP ERN ETB EUR FJD FKP GBP GEL GHS GIP GMD GTQ GYD HKD HNL HTG HUF IDR ILS '
        'INR IRR JMD KES KGS KHR KPW KYD KZT LAK LBP LKR LRD LSL MAD MDL MGA MKD MMK MNT MOP MRU MUR MVR MWK MXN MXV MYR '
        'MZN NAD NGN NIO NOK NPR NZD PAB PEN PGK PHP PKR PLN QAR RON RSD RUB SAR SBD SCR SDG SEK SGD SHP SLE SOS SRD SSP STN '
        'SVC SYP SZL THB TJS TMT TOP TRY TTD TWD TZS UAH USD USN UYU UZS VED VES WST XCD XCG YER ZAR ZMW ZWG'),
    (3, 'BHD IQD JOD KWD LYD OMR TND'),
    (4, 'CLF UYW')) d (digits, codes), regexp_split_to_table(d.codes, ' ') c (code);

-- An account and its balance: the sum of its entries, kept by whatever adds one. Positive is debit. Nothing here but
-- balance, entries and overdraft is ever changed; the free space of a page keeps those changes off the indexes. No
-- CHECK: it would be read anew for every UPDATE. open_account and set_overdraft check.
CREATE TABLE once_ledger.account (
    id        bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    balance   bigint NOT NULL DEFAULT 0,
    entries   bigint NOT NULL DEFAULT 0,         -- how many there are, and the number of the last
    overdraft bigint,                            -- how far beyond zero it may go, on the other side than its own; NULL: any
    opened_at timestamptz NOT NULL,
    side      smallint NOT NULL,                 -- 1: grows by debits; -1: by credits
    currency  varchar(12) COLLATE "C" NOT NULL,
    tenant    varchar(255) COLLATE "C" NOT NULL,
    account   varchar(255) COLLATE "C" NOT NULL,
    UNIQUE (tenant, account)
) WITH (fillfactor = 50);

-- A group of entries that balance, named by the operation that it books. Written once. No foreign keys: on the straight
-- path they cost more than the rest of the UPDATE. One function writes, nothing is deleted, and verify looks for orphans.
CREATE TABLE once_ledger.posting (
    id           bigint GENERATED ALWAYS AS IDENTITY,
    at           timestamptz NOT NULL,
    reverses     bigint,                         -- the group that this one takes back
    tenant       varchar(255) COLLATE "C" NOT NULL,
    source       varchar(128) COLLATE "C" NOT NULL,
    operation    varchar(255) COLLATE "C" NOT NULL,
    entries_hash bytea NOT NULL,
    description  text,
    PRIMARY KEY (tenant, source, operation)
);
CREATE INDEX posting_id ON once_ledger.posting (id); -- not unique: ON CONFLICT would ask it as well, for every posting
CREATE UNIQUE INDEX posting_reverses ON once_ledger.posting (reverses) WHERE reverses IS NOT NULL;

-- A line of a group. Written once, with the balance of its account after it.
CREATE TABLE once_ledger.entry (
    posting_id bigint NOT NULL,
    account_id bigint NOT NULL,
    number     bigint NOT NULL,                  -- in its account: 1, 2, 3 … without a gap, in the order of commits
    amount     bigint NOT NULL,
    balance    bigint NOT NULL,
    line       smallint NOT NULL,
    PRIMARY KEY (posting_id, line),
    CONSTRAINT entry_of_account UNIQUE (account_id, number)
);

-- What posting answers: the group, whether it was there already, and the balances of its accounts after it, by name.
CREATE TYPE once_ledger.posted AS (posting_id bigint, kind text, accounts text[], balances bigint[]);
-- A group of a batch: checked, its entries sorted.
CREATE TYPE once_ledger.batch_group AS (ordinal int, source text, operation text, description text,
    accounts text[], amounts bigint[], currencies text[], entries_hash bytea);

-- History is not changed, not even by its owner, short of disabling this.
CREATE FUNCTION once_ledger.immutable() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    RAISE EXCEPTION 'the ledger is never changed' USING ERRCODE = 'P4096',
        DETAIL = 'Nothing was changed.', HINT = 'Correct it by a new posting: once_ledger.reverse.';
END $$;
CREATE TRIGGER immutable BEFORE UPDATE OR DELETE OR TRUNCATE ON once_ledger.posting EXECUTE FUNCTION once_ledger.immutable();
CREATE TRIGGER immutable BEFORE UPDATE OR DELETE OR TRUNCATE ON once_ledger.entry EXECUTE FUNCTION once_ledger.immutable();
CREATE TRIGGER immutable BEFORE UPDATE OF id, opened_at, side, currency, tenant, account OR DELETE OR TRUNCATE
    ON once_ledger.account EXECUTE FUNCTION once_ledger.immutable();
CREATE TRIGGER immutable BEFORE UPDATE OF code, digits OR DELETE OR TRUNCATE ON once_ledger.currency EXECUTE FUNCTION once_ledger.immutable();
-- Also where a session calls itself a replica.
ALTER TABLE once_ledger.posting ENABLE ALWAYS TRIGGER immutable;
ALTER TABLE once_ledger.entry ENABLE ALWAYS TRIGGER immutable;
ALTER TABLE once_ledger.account ENABLE ALWAYS TRIGGER immutable;
ALTER TABLE once_ledger.currency ENABLE ALWAYS TRIGGER immutable;
