package diagnose

import (
	"bytes"
	"errors"
	"strings"

	"github.com/zricethezav/gitleaks/v8/detect"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/lazyregexp"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/leaks"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/secret"
)

const (
	// Secrets that are found in one part by their form. A guest that fills its console with texts that
	// look like secrets would otherwise use up time and memory.
	maxFound = 500

	// Length from which a value that is found in one part is removed from all parts. A shorter one may be
	// an ordinary word.
	minDistinct = 12
)

var errTooMany = errors.New("too many texts look like secrets")

// forms match what gitleaks has no rules for, with the secret in their groups.
var forms = []*lazyregexp.Regexp{
	// A login in a URL. Passwords with @ are not valid there, but occur.
	lazyregexp.New(`://([^/\s'"]*)@`),
	// The tokens of a subscription of Claude.
	lazyregexp.New(`(sk-ant-[a-z]+[0-9]+-[A-Za-z0-9_-]{20,})`),
	// Headers of HTTP, also inside JSON.
	lazyregexp.New(`(?i)\b(?:(?:proxy-)?authorization|(?:set-)?cookie|x-[a-z-]*(?:key|token|secret))\\?["']?[ \t]*[:=][ \t]*\\?["']?((?:[^"\\\r\n]|\\[^"])+)`),
	// Passwords, which may be short, and words.
	lazyregexp.New(`(?i)(?:passw(?:or)?d|passphrase)\\?["']?[ \t]*[:=][ \t]*(?:\\?"((?:[^"\\\n]|\\.)*)|([^\s"',;&]+))`),
	// The beginning of a private key, at the end of a log that is being written.
	lazyregexp.New(`(-----BEGIN [A-Z0-9 ]*PRIVATE KEY[A-Z ]*-----(?:[A-Za-z0-9+/=\s]|\\[nr])*)`),
	// The end of a private key, at the beginning of the end of a log.
	lazyregexp.New(`([A-Za-z0-9+/=](?:[A-Za-z0-9+/=\s]|\\[nr])*-----END [A-Z0-9 ]*PRIVATE KEY[A-Z ]*-----)`),
}

// finder finds secrets by their form.
type finder struct{ rules *detect.Detector }

func newFinder() (finder, error) {
	d, err := leaks.NewDetector()
	if err != nil {
		return finder{}, err
	}
	d.MaxDecodeDepth = 2 // for base64 in base64, as in Kubernetes' secrets
	return finder{d}, nil
}

// find returns the secrets in a text.
func (f finder) find(text string) ([]secret.Value, error) {
	found := map[string]bool{}
	for _, l := range f.rules.DetectString(text) {
		found[l.Secret] = true
	}
	for _, form := range forms {
		for _, at := range form.FindAllStringSubmatchIndex(text, -1) {
			for g := 2; g < len(at); g += 2 {
				if at[g] >= 0 && at[g+1]-at[g] >= minDistinct {
					found[text[at[g]:at[g+1]]] = true
				}
			}
		}
	}
	if len(found) > maxFound {
		return nil, errTooMany
	}
	all := make([]secret.Value, 0, len(found))
	for value := range found {
		all = append(all, secret.NewValue(value))
	}
	return all, nil
}

// hide replaces what redact knows, also if a program has wrapped it, and what matches a form.
func hide(redact *secret.Redactor, text string) string {
	text = hideWrapped(redact, redact.Redact(text))
	for _, form := range forms {
		text = hideGroups(form, text)
	}
	return text
}

// hideGroups replaces the groups of each match.
func hideGroups(form *lazyregexp.Regexp, text string) string {
	var out strings.Builder
	end := 0
	for _, at := range form.FindAllStringSubmatchIndex(text, -1) {
		for g := 2; g < len(at); g += 2 {
			if at[g] >= 0 {
				out.WriteString(text[end:at[g]] + marker)
				end = at[g+1]
			}
		}
	}
	return out.String() + text[end:]
}

// hideWrapped replaces secrets that continue on the next line, after its indentation.
func hideWrapped(redact *secret.Redactor, text string) string {
	joined := make([]byte, 0, len(text))
	breaks := make([]bool, len(text)) // which bytes of text joined lacks
	for i := range len(text) {
		inIndent := i > 0 && breaks[i-1]
		breaks[i] = text[i] == '\n' || inIndent && (text[i] == ' ' || text[i] == '\t')
		if !breaks[i] {
			joined = append(joined, text[i])
		}
	}
	var masked bytes.Buffer
	mask := redact.Mask(&masked)
	_, err := mask.Write(joined)
	if errors.Join(err, mask.Close()) != nil || masked.Len() != len(joined) { // a buffer cannot fail
		return marker
	}
	var out strings.Builder
	hiding, next := false, 0
	for i := range len(text) {
		if breaks[i] {
			out.WriteByte(text[i])
			continue
		}
		isSecret := masked.Bytes()[next] != joined[next]
		switch next++; {
		case !isSecret:
			out.WriteByte(text[i])
		case !hiding:
			out.WriteString(marker)
		}
		hiding = isSecret
	}
	return out.String()
}
