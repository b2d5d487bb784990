-- A number as ECMAScript's Number::toString prints the double nearest to it: plain from 1e-6 up to below
-- 1e21, otherwise with an exponent. What a double cannot hold is refused, without telling the value; what
-- is nearer to zero than to the smallest double is zero, as in every reader of JSON.
-- STABLE, not IMMUTABLE: the shortest digits need extra_float_digits = 1, which canonical_json pins once.
CREATE OR REPLACE FUNCTION once.canonical_number(p_number numeric) RETURNS text
LANGUAGE plpgsql STABLE STRICT AS $$
DECLARE
    v_text text := trim_scale(p_number)::text;
BEGIN
    -- No two decimals of up to 15 digits share a double: the digits that came are the shortest ones.
    IF length(v_text) <= 15 AND (abs(p_number) >= 0.000001 OR p_number = 0) THEN
        RETURN v_text;
    END IF;
    -- Both limits are where rounding to the nearest double tips over. The cast would raise at them, too,
    -- but its message carries the value.
    IF abs(p_number) >= power(2::numeric, 1024) - power(2::numeric, 970) THEN
        RAISE EXCEPTION 'payload has a number that does not fit a double' USING ERRCODE = 'P4003',
            HINT = 'Send such a number as a string, or fingerprint the bytes with once.fingerprint_bytes.';
    END IF;
    IF abs(p_number) < 1e-323 AND abs(p_number) * power(2::numeric, 1075) <= 1 THEN
        RETURN '0';
    END IF;
    v_text := p_number::float8::text;
    IF v_text LIKE '%e+%' THEN
        RETURN once.canonical_large(v_text);
    ELSIF v_text LIKE '%e-05' OR v_text LIKE '%e-06' THEN
        RETURN v_text::numeric::text;
    END IF;
    RETURN replace(v_text, 'e-0', 'e-');
END $$;
