package secret

import (
	"encoding/base64"
	"encoding/hex"
	"encoding/json"
	"net/url"
	"strings"
)

const (
	minLine    = 8    // shortest line of a multi-line value that is matched separately
	maxPattern = 4096 // longest pattern, and so the most that a stream holds back
	pieceLen   = 512  // a longer value is matched in pieces of this length
	manyForms  = 16 << 10
)

// forms returns every string to match for one value. None is shorter than minRedact
// or longer than maxPattern.
func forms(value string) []string {
	var out []string
	for _, p := range split(value) {
		out = append(append(out, p), base64Forms(p)...)
		if len(value) > manyForms { // a bundle of certificates, not a token
			continue
		}
		for _, f := range []func(string) string{
			jsonEscape, jsonEscapeHTML, slashes, url.QueryEscape, url.PathEscape, lowerPercent, singleQuoted, backslashed,
			func(s string) string { return hex.EncodeToString([]byte(s)) },
			func(s string) string { return strings.ToUpper(hex.EncodeToString([]byte(s))) },
		} {
			out = append(out, f(p))
		}
	}
	return out
}

// split returns the parts of a value to match: the whole, as it appears in a file and
// on a terminal, and its lines. It splits long lines into pieces.
func split(value string) []string {
	value = strings.TrimRight(value, "\r\n")
	if len(value) < minRedact {
		return nil
	}
	var out []string
	if len(value) <= pieceLen {
		out = append(out, value, strings.ReplaceAll(strings.ReplaceAll(value, "\r\n", "\n"), "\n", "\r\n"))
	}
	for line := range strings.Lines(value) {
		if line = strings.TrimSpace(line); len(line) >= minLine {
			out = append(out, chunks(line)...)
		}
	}
	return out
}

func chunks(s string) []string {
	var out []string
	for len(s) > pieceLen {
		out = append(out, s[:pieceLen])
		if s = s[pieceLen:]; len(s) < minRedact { // let the last piece overlap rather than be too short
			s = out[len(out)-1][pieceLen-minRedact:] + s
		}
	}
	return append(out, s)
}

// base64Forms returns the strings by which s appears inside base64 text. These are
// its own encoding and, for each of the three alignments, the part that does not
// depend on neighbouring bytes. An example is "user:TOKEN" in an Authorization
// header.
func base64Forms(s string) []string {
	var out []string
	for _, enc := range []*base64.Encoding{base64.RawStdEncoding, base64.RawURLEncoding} {
		for pad := range 3 {
			text := enc.EncodeToString([]byte("\x00\x00"[:pad] + s))
			from := []int{0, 2, 3}[pad] // characters that hold bits of the padding
			to := len(text)
			if (pad+len(s))%3 != 0 {
				to-- // the last character holds bits of the following byte
			}
			if to-from >= minLine {
				out = append(out, text[from:to])
			}
		}
	}
	return out
}

// jsonEscape returns s as inside a JSON string, as most programs write it.
func jsonEscape(s string) string {
	var b strings.Builder
	e := json.NewEncoder(&b)
	e.SetEscapeHTML(false)
	_ = e.Encode(s) // a string can always be encoded
	return inner(strings.TrimSuffix(b.String(), "\n"))
}

// jsonEscapeHTML returns s as inside a JSON string, as Go's encoder writes it.
func jsonEscapeHTML(s string) string {
	b, _ := json.Marshal(s) // a string can always be encoded
	return inner(string(b))
}

// slashes returns the JSON form of programs that also escape the slash.
func slashes(s string) string { return strings.ReplaceAll(jsonEscape(s), "/", `\/`) }

func inner(quoted string) string { return quoted[1 : len(quoted)-1] }

// lowerPercent returns the URL encoding with lower-case hex digits.
func lowerPercent(s string) string {
	b := []byte(url.QueryEscape(s))
	for i := range b {
		if b[i] == '%' { // two hex digits follow
			b[i+1] |= 'a' - 'A'
			b[i+2] |= 'a' - 'A'
		}
	}
	return string(b)
}

// singleQuoted returns s as inside '…', as `set -x` and Quote functions write it.
func singleQuoted(s string) string { return strings.ReplaceAll(s, "'", `'\''`) }

// backslashed returns s as `printf %q` writes it.
func backslashed(s string) string {
	var b strings.Builder
	for _, c := range s {
		if strings.ContainsRune(" \t!\"#$&'()*;<>?[\\]^`{|}~", c) {
			b.WriteByte('\\')
		}
		b.WriteRune(c)
	}
	return b.String()
}
