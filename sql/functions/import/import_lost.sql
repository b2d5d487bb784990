-- One message for every word about an import that is not the caller's.
CREATE OR REPLACE FUNCTION once.import_lost() RETURNS void LANGUAGE plpgsql IMMUTABLE AS $$
BEGIN
    RAISE EXCEPTION 'the import is not this importer''s any more, or its next row is another one' USING ERRCODE = 'P4081',
        HINT = 'Roll back: nothing of this batch stays. Somebody else has taken the import over, or ended it.';
END $$;
