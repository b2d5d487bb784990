-- The part of canonical_number for doubles from 1e15, given as PostgreSQL prints them.
-- PostgreSQL does not print a decimal that lies exactly halfway between two doubles, though it reads back
-- as the right one; ECMAScript does where it is shorter: 1e23, not 9.999999999999999e+22. If there is one,
-- it is next to what PostgreSQL prints, with a digit less. Above 1e40 there is none: it would have to be an
-- odd number of at most 55 bits that 5^24 divides.
CREATE OR REPLACE FUNCTION once.canonical_large(p_double text) RETURNS text
LANGUAGE plpgsql IMMUTABLE STRICT AS $$
DECLARE
    v_sign text := CASE WHEN p_double LIKE '-%' THEN '-' ELSE '' END;
    v_number numeric := abs(p_double::numeric);
    v_plain text := v_number::text;
    v_digits text := rtrim(v_plain, '0');
    v_unit numeric;
    v_below numeric;
BEGIN
    IF length(v_digits) > 15 AND v_number < 1e40 THEN
        v_unit := ('1e' || length(v_plain) - length(v_digits) + 1)::numeric;
        v_below := div(v_number, v_unit) * v_unit;
        IF v_below::float8 = v_number::float8 THEN
            v_plain := v_below::text;
        ELSIF (v_below + v_unit)::float8 = v_number::float8 THEN
            v_plain := (v_below + v_unit)::text;
        END IF;
        v_digits := rtrim(v_plain, '0');
    END IF;
    IF length(v_plain) <= 21 THEN
        RETURN v_sign || v_plain;
    END IF;
    RETURN v_sign || left(v_digits, 1) || CASE WHEN length(v_digits) > 1 THEN '.' ELSE '' END
        || substr(v_digits, 2) || 'e+' || length(v_plain) - 1;
END $$;
