package policy

import (
	"errors"
	"fmt"
	"io"
	"net/netip"
	"strings"
	"unicode"
	"unicode/utf8"
)

const (
	maxFile   = 1 << 20 // bytes of an allowlist
	maxErrors = 100     // reported at once; the rest is counted
	maxName   = 253     // bytes of a DNS name in text form
	maxLabel  = 63      // bytes of a DNS label
)

// Parse reads an allowlist: one name per line, blank lines, and comments from
// "#" to the end of the line. It returns every error of the file at once, each
// as "file:line: what; what to do", and no rules when there is one. A name that
// stands twice is kept once. The result is never nil without an error, so that
// an empty list can be told from no list.
func Parse(r io.Reader, file string) ([]Rule, error) {
	data, err := io.ReadAll(io.LimitReader(r, maxFile+1))
	if err != nil {
		return nil, fmt.Errorf("read %s: %w", file, err)
	}
	if len(data) > maxFile {
		return nil, fmt.Errorf("%s: larger than %d bytes; an allowlist is a list of names, use *.zone for many of one zone", file, maxFile)
	}
	var (
		rules   = []Rule{}
		seen    = map[string]bool{}
		errs    []error
		omitted int
		text    = strings.TrimPrefix(string(data), "\ufeff")
		number  int
	)
	for line := range strings.Lines(text) {
		number++
		line, _, _ = strings.Cut(line, "#")
		line = strings.Trim(line, " \t\r\n")
		if line == "" {
			continue
		}
		pattern, err := ParsePattern(line)
		switch {
		case err != nil && len(errs) >= maxErrors:
			omitted++
		case err != nil:
			errs = append(errs, fmt.Errorf("%s:%d: %w", file, number, err))
		case seen[pattern]:
		case len(rules) == MaxRules:
			return nil, fmt.Errorf("%s:%d: more than %d names; use *.zone for many of one zone", file, number, MaxRules)
		default:
			seen[pattern] = true
			rules = append(rules, Rule{Pattern: pattern, Source: fmt.Sprintf("%s:%d", file, number)})
		}
	}
	if omitted > 0 {
		errs = append(errs, fmt.Errorf("%s: %d more lines with errors; is this an allowlist?", file, omitted))
	}
	if len(errs) > 0 {
		return nil, errors.Join(errs...)
	}
	return rules, nil
}

// ParsePattern returns the canonical form of one allowlist entry, or an error
// that reads "what; what to do".
func ParsePattern(s string) (string, error) {
	if s == "" {
		return "", errors.New("empty name; write a host name such as github.com")
	}
	if !utf8.ValidString(s) {
		return "", fmt.Errorf("%q is not text; write a host name such as github.com", clip(s))
	}
	for _, r := range s {
		if r > unicode.MaxASCII {
			return "", fmt.Errorf("%q holds the character %q (%U), which may only look like a letter; retype it in ASCII, or write the name's xn-- form if it is meant", clip(s), r, r)
		}
	}
	if err := notAName(s); err != nil {
		return "", err
	}
	name, wildcard := strings.CutPrefix(strings.ToLower(s), "*.")
	if strings.Contains(name, "*") {
		return "", fmt.Errorf("%q has a * that is not the whole first label; write *.zone or list the names", clip(s))
	}
	if wildcard && registryZone(name) {
		return "", fmt.Errorf("%q opens a whole registry of strangers' names; list the names, or *.zone of one owner", clip(s))
	}
	if err := hostName(name); err != nil {
		return "", fmt.Errorf("%q %w", clip(s), err)
	}
	if wildcard {
		return "*." + name, nil
	}
	return name, nil
}

// notAName names the usual things that are written where a name belongs.
func notAName(s string) error {
	if s == "*" || s == "*." {
		return errors.New(`"*" allows every name; use mode: open if that is meant`)
	}
	if strings.Contains(s, "://") {
		return fmt.Errorf("%q is a URL; write only its host name", clip(s))
	}
	if strings.ContainsAny(s, "/?&=\\") {
		if _, err := netip.ParsePrefix(s); err == nil {
			return fmt.Errorf("%q is an address range; only names can be listed, an address on your network is a host service", clip(s))
		}
		return fmt.Errorf("%q has a path; write only the host name, paths cannot be checked", clip(s))
	}
	if strings.ContainsAny(s, " \t") {
		return fmt.Errorf("%q holds a space; write one name per line", clip(s))
	}
	if strings.Contains(s, "@") {
		return fmt.Errorf("%q names a user; write only the host name", clip(s))
	}
	bare := strings.Trim(s, "[]")
	_, errAddr := netip.ParseAddr(bare)
	_, errPort := netip.ParseAddrPort(s)
	if errAddr == nil || errPort == nil {
		return fmt.Errorf("%q is an IP address; only names can be listed, an address on your network is a host service", clip(s))
	}
	if strings.Contains(s, ":") {
		return fmt.Errorf("%q has a port; write only the host name, ports are a setting of their own", clip(s))
	}
	return nil
}

// hostName checks the letters-digits-hyphen rule of host names.
func hostName(name string) error {
	switch {
	case strings.HasSuffix(name, "."):
		return errors.New("ends in a dot; drop it")
	case strings.HasPrefix(name, "."):
		return errors.New("starts with a dot; write *.zone for the names below a zone")
	case len(name) > maxName:
		return fmt.Errorf("is longer than %d bytes; no such name can exist", maxName)
	case !strings.Contains(name, "."):
		return errors.New("is a single label; write the full name, such as github.com")
	}
	var last string
	for last = range strings.SplitSeq(name, ".") {
		switch {
		case last == "":
			return errors.New("has an empty label; remove the doubled dot")
		case len(last) > maxLabel:
			return fmt.Errorf("has a label over %d bytes; no such name can exist", maxLabel)
		case last[0] == '-' || last[len(last)-1] == '-':
			return errors.New("has a label that starts or ends with a hyphen; remove it")
		}
		for _, c := range []byte(last) {
			if !isLDH(c) {
				return fmt.Errorf("holds the character %q; host names have only letters, digits, hyphens and dots", c)
			}
		}
	}
	if allDigits(last) {
		return errors.New("ends in a number, like an IP address; write a host name")
	}
	return nil
}

// registryZone reports whether anybody can register a name right below zone:
// top-level domains and the second-level registries of countries. It is a
// guard against a slip, not a copy of the public suffix list.
func registryZone(zone string) bool {
	second, top, ok := strings.Cut(zone, ".")
	if !ok {
		return true
	}
	if len(top) != 2 {
		return false
	}
	switch second {
	case "co", "com", "net", "org", "gov", "edu", "ac", "or", "ne", "go":
		return true
	}
	return false
}

func isLDH(c byte) bool {
	return c >= 'a' && c <= 'z' || c >= '0' && c <= '9' || c == '-'
}

func allDigits(s string) bool {
	return strings.Trim(s, "0123456789") == ""
}

// clip keeps what a message quotes to a readable length.
func clip(s string) string {
	const limit = 80
	if len(s) <= limit {
		return s
	}
	return s[:limit] + "…"
}
