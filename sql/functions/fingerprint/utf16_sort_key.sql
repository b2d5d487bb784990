-- A text that sorts under COLLATE "C" (by code point) as p_key sorts by UTF-16 code units. The two orders
-- differ in one place: UTF-16 writes characters beyond U+FFFF with surrogates, D800 to DFFF, and so has them
-- before U+E000 to U+FFFF. Those get the last character of Unicode in front of them, which puts them behind
-- all others; that character itself gets the first one behind it, and stays before them.
-- Only for UTF8 databases, and plpgsql for that reason: others could not even parse the characters.
CREATE OR REPLACE FUNCTION once.utf16_sort_key(p_key text) RETURNS text
LANGUAGE plpgsql IMMUTABLE STRICT AS $$
BEGIN
    IF p_key COLLATE "C" !~ E'[\\uE000-\\uFFFF\\U0010FFFF]' THEN
        RETURN p_key;
    END IF;
    RETURN regexp_replace(replace(p_key COLLATE "C", chr(1114111), chr(1114111) || chr(1)),
                          E'([\\uE000-\\uFFFF])', chr(1114111) || E'\\1', 'g');
END $$;
