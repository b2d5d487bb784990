-- Imports: a job for each file and what is asked of it, a record for each batch, and a row for each failure.
-- See docs/guides/imports.md.

CREATE TYPE once.import_state AS ENUM ('running', 'stopped', 'done', 'abandoned');

CREATE TABLE once.import_job (
    id           bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    state        once.import_state NOT NULL DEFAULT 'running',
    run          int NOT NULL DEFAULT 1,          -- the same file once more, because somebody asked for it
    next_row     bigint NOT NULL DEFAULT 1 CHECK (next_row >= 1),
    next_offset  bigint NOT NULL DEFAULT 0,       -- where that row begins, in the unpacked content
    next_line    bigint NOT NULL DEFAULT 1,
    applied      bigint NOT NULL DEFAULT 0,
    skipped      bigint NOT NULL DEFAULT 0,
    failed       bigint NOT NULL DEFAULT 0,
    size         bigint NOT NULL CHECK (size >= 0),
    started_at   timestamptz NOT NULL,
    updated_at   timestamptz NOT NULL,
    ended_at     timestamptz,
    leased_until timestamptz,
    claim_id     uuid NOT NULL,                   -- the fence of who imports, or did last
    tenant       varchar(255) COLLATE "C" NOT NULL,
    content      bytea NOT NULL CHECK (octet_length(content) = 32), -- SHA-256 of the file as it is
    options_hash bytea NOT NULL CHECK (octet_length(options_hash) = 32),
    options      jsonb NOT NULL,
    target       text NOT NULL,
    name         text NOT NULL,                   -- the file's, for people
    owner        text NOT NULL,
    actor        text NOT NULL,
    header       bytea,                           -- the file's first line, for what is written back
    last_error   text,
    UNIQUE (tenant, content, options_hash, run),
    CONSTRAINT import_job_shape CHECK (
        (state = 'running') = (leased_until IS NOT NULL)
        AND (state IN ('done', 'abandoned')) = (ended_at IS NOT NULL)
        AND applied + skipped + failed = next_row - 1)
);
-- Purge, and what stands still.
CREATE INDEX import_job_ended ON once.import_job (state, ended_at);

-- Written in the transaction that writes the rows into the target. What is not named here was applied.
CREATE TABLE once.import_batch (
    job       bigint NOT NULL REFERENCES once.import_job ON DELETE CASCADE,
    first_row bigint NOT NULL,
    last_row  bigint NOT NULL,
    applied   int NOT NULL,
    failed    int NOT NULL,
    at        timestamptz NOT NULL,
    existing  int8multirange,                     -- rows whose key was there already
    unchanged int8multirange,                     -- rows that say what was there already
    dropped   int8multirange,                     -- rows that a trigger of the target let go
    PRIMARY KEY (job, first_row),
    CHECK (first_row <= last_row)
);

CREATE TABLE once.import_row (
    job     bigint NOT NULL REFERENCES once.import_job ON DELETE CASCADE,
    row     bigint NOT NULL,
    line    bigint NOT NULL,
    code    text NOT NULL,
    message text NOT NULL,
    input   bytea NOT NULL,                       -- as it stands in the file
    PRIMARY KEY (job, row)
);
