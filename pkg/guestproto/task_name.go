package guestproto

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"strings"
	"unicode"
	"unicode/utf8"
)

// These limit the names of artifacts, so that every host file system accepts them.
const (
	maxElement      = 255  // bytes between slashes
	MaxArtifactName = 4000 // bytes
)

// EscapeName turns a guest's path, which may contain any bytes, into a name that a
// host accepts and a person can read. It writes each byte that is not printable
// UTF-8, and each %, as %XX, so that url.PathUnescape returns the path. Only a result
// too long for a file system is cut; it then ends with ~ and a checksum of the whole
// path.
func EscapeName(raw string) string {
	elements := strings.Split(raw, "/")
	for i, e := range elements {
		elements[i] = escapeElement(e)
	}
	return strings.Join(elements, "/")
}

func escapeElement(raw string) string {
	var b strings.Builder
	cut := 0 // where the name can be cut
	const hash = 16
	for i := 0; i < len(raw); {
		r, n := utf8.DecodeRuneInString(raw[i:])
		if r == '%' || r == utf8.RuneError && n <= 1 || !unicode.IsPrint(r) {
			for _, c := range []byte(raw[i : i+n]) {
				fmt.Fprintf(&b, "%%%02X", c)
			}
		} else {
			b.WriteString(raw[i : i+n])
		}
		i += n
		if b.Len() <= maxElement-hash-1 {
			cut = b.Len()
		}
	}
	if b.Len() <= maxElement {
		return b.String()
	}
	sum := sha256.Sum256([]byte(raw))
	return b.String()[:cut] + "~" + hex.EncodeToString(sum[:])[:hash]
}

// CheckArtifactName returns an error unless a name that came from a guest is valid
// for a file on the host.
func CheckArtifactName(name string) error {
	bad := func(why string) error { return fmt.Errorf("the name %q %s", shorten(name, maxName), why) }
	if name == "" || len(name) > MaxArtifactName {
		return bad("is empty or too long")
	}
	for e := range strings.SplitSeq(name, "/") {
		switch {
		case e == "" || e == "." || e == "..":
			return bad("must be that of a file below its directory")
		case len(e) > maxElement:
			return bad("is too long")
		}
	}
	for i, r := range name {
		switch {
		case r == utf8.RuneError && !strings.HasPrefix(name[i:], "\ufffd"):
			return bad("is not UTF-8")
		case !unicode.IsPrint(r):
			return bad("contains an unprintable character")
		case r == '%' && !escaped(name[i+1:]):
			return bad("has a % without two hexadecimal digits")
		}
	}
	return nil
}

// escaped reports whether s begins with two digits as EscapeName writes them.
func escaped(s string) bool {
	return len(s) >= 2 && strings.Trim(s[:2], "0123456789ABCDEF") == ""
}
