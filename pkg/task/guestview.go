package task

import (
	"path"
	"strings"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/lazyregexp"
)

// GuestView returns t as the guest of its parent sees it: without paths of the host, and without
// the texts of errors that are about the host.
func (t Task) GuestView() View {
	v := t.View()
	if r := v.Repository; strings.HasPrefix(r, "/") || strings.HasPrefix(r, "file:") {
		v.Repository = strings.TrimSuffix(path.Base(r), ".git")
	}
	if v.Error != nil {
		v.Error.Message, v.Error.Hint = forGuest(v.Error.Code, v.Error.Message), ""
	}
	if v.Outcome != nil {
		o := *v.Outcome
		o.Hint = ""
		if o.Code != "" { // of an error of the host, not of the agent
			o.Reason = forGuest(o.Code, o.Reason)
		}
		v.Outcome = &o
	}
	return v
}

// Hidden is what a guest reads instead of an error that is about the host.
const Hidden = "the host could not do this; its user finds the reason in the log"

// forGuest returns the text of an error as a guest may read it.
func forGuest(code, text string) string {
	switch fail.ParseCode(code) {
	case fail.Usage, fail.Policy, fail.Conflict, fail.NotFound:
		return HidePaths(text)
	}
	return Hidden
}

// hostPath matches an absolute path, but not the path of a URL.
var hostPath = lazyregexp.New(`file:/[^\s"']*|(^|[^\w./])/[^/\s"'][^\s"']*`)

// HidePaths returns a text without the absolute paths in it.
func HidePaths(text string) string { return hostPath.ReplaceAllString(text, "$1(a path)") }
