-- When purge has to look again at a stretch of the dedup rows. Purge writes it and nobody else, so that admitting a
-- message does not pay for an index on its arrival: a block-range index cost a fifth of the whole batch.

DROP INDEX once.admitted_at;

CREATE TABLE once.admitted_range (
    number int PRIMARY KEY,          -- 128 pages each, from the beginning of once.admitted
    due    timestamptz NOT NULL      -- nothing in it expires before
);
