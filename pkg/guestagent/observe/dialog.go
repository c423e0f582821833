package observe

import (
	"context"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"
	"unicode"
	"unicode/utf8"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/guestagent/sys"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/guestproto"
)

// Codex opens the dialog of a permission only after its hook has ended, so the hook cannot
// return the answer. It is typed into the dialog instead, while the screen shows it.
const (
	dialogEvery = time.Second      // starts a process; only while such a question is open
	dialogSoon  = 20 * time.Second // a dialog appears within this time after its hook
	typeEvery   = 3 * time.Second  // between two attempts, of all watchers together

	typedFile = ".typed" // a lock, with the id of the question whose answer was typed last
	shownText = 40       // characters of a command that a dialog shows, however small the terminal is
	wholeText = 400      // characters of a command that tell dialogs apart
)

// inDialog makes q a question whose answer is typed into the terminal that the hook runs in.
// ok is false without such a terminal.
func (q question) inDialog(e event) (_ question, ok bool) {
	_, what := e.toolUse()
	q.Pane, q.Shows = os.Getenv("TMUX_PANE"), withoutSpace(what, wholeText)
	return q, q.Pane != "" && q.Shows != ""
}

// withoutSpace returns the first characters of a text that are not white space. A terminal
// wraps lines, and programs indent them.
func withoutSpace(s string, most int) string {
	var b strings.Builder
	for _, r := range s {
		if !unicode.IsSpace(r) && most > 0 {
			b.WriteRune(r)
			most--
		}
	}
	return b.String()
}

// dialogOn returns the text of the dialog that a screen of Codex shows, without white space; "" if
// it shows none.
func dialogOn(screen string) string {
	at := strings.LastIndex(screen, "Would you like to")
	if at < 0 || !strings.Contains(screen[at:], "(esc)") {
		return ""
	}
	return withoutSpace(screen[at:], len(screen))
}

// isDialog reports whether a dialog is the one of the question. A command is shown after a prompt,
// and before the first choice.
func (q question) isDialog(dialog string) bool {
	text := withoutSpace(q.Shows, shownText)
	if dialog == "" || q.Tool != "Bash" {
		return strings.Contains(dialog, text)
	}
	_, after, found := strings.Cut(dialog, "$"+text)
	return found && (utf8.RuneCountInString(text) == shownText || strings.HasPrefix(strings.TrimPrefix(after, "›"), "1."))
}

// isWholeIn reports whether a dialog shows all that is known of the question.
func (q question) isWholeIn(dialog string) bool { return strings.Contains(dialog, q.Shows) }

// dialogs is what the watcher knows about questions whose answers are typed.
type dialogs struct {
	running bool
	looked  time.Time
	seen    map[string]bool // ids of the questions whose dialog was on the screen
}

// dialogsDue reports whether to look at the dialogs.
func (w *watcher) dialogsDue(now time.Time) bool {
	if w.dialogs.running || now.Sub(w.dialogs.looked) < dialogEvery {
		return false
	}
	for _, q := range w.questions {
		if q.Pane != "" {
			return true
		}
	}
	return false
}

// typist types the answers into the dialogs that are on the screen, and ends the questions
// whose dialogs are gone.
func (w *watcher) typist(now time.Time) func(context.Context) func() {
	w.dialogs.looked = now
	next := dialogs{looked: now, seen: map[string]bool{}}
	open, was, g := w.questions, w.dialogs, w.guest
	return func(ctx context.Context) func() {
		for _, q := range open {
			if q.Pane == "" {
				continue
			}
			screen, err := tmux(ctx, "capture-pane", "-p", "-t", q.Pane)
			dialog := dialogOn(screen)
			shown := err == nil && q.isDialog(dialog)
			next.seen[q.ID] = was.seen[q.ID] || shown
			answer, err := answerTo(g, q)
			switch {
			case shown && err == nil && wasTyped(g, q) && hasRival(open, q):
				q.endDialog(g) // the dialog may be the next one
			case shown && err == nil && !isUnclear(g, open, q, dialog, answer):
				typeAnswer(ctx, g, q, answer)
			case !shown && (next.seen[q.ID] || time.Since(q.At) > dialogSoon):
				q.endDialog(g)
			}
		}
		return func() { w.dialogs, w.sureQuestions = next, true }
	}
}

// Codex shows one dialog at a time, and a dialog does not say which request it belongs to. So an
// answer must not be typed into the dialog of another request that looks the same: it is typed
// again only while no other request is open.

func answerTo(g sys.Guest, q question) (string, error) {
	data, err := sys.ReadFile(questionPath(g, q.ID, answerFile), maxQuestionFile)
	return string(data), err
}

// wasTyped reports whether the answer to a question is the one that was typed last.
func wasTyped(g sys.Guest, q question) bool {
	return sys.Text(filepath.Join(g.Path(questionDir), typedFile)) == q.ID
}

// hasRival reports whether a question is not the only one of its pane.
func hasRival(open []question, q question) bool {
	return slices.ContainsFunc(open, func(o question) bool { return o.Pane == q.Pane && o.ID != q.ID })
}

// isUnclear reports whether a dialog may belong to another request than q's, with another answer
// or none. Requests with the same text may be confused.
func isUnclear(g sys.Guest, open []question, q question, dialog, answer string) bool {
	return slices.ContainsFunc(open, func(o question) bool {
		if o.Pane != q.Pane || o.Text == q.Text || !o.isDialog(dialog) || q.isWholeIn(dialog) && !o.isWholeIn(dialog) {
			return false
		}
		other, err := answerTo(g, o)
		return err != nil || other != answer
	})
}

// endDialog ends a question whose dialog is gone: by the answer that was typed, or by one that
// the user gave in the terminal.
func (q question) endDialog(g sys.Guest) {
	if wasTyped(g, q) {
		_, _ = takeAnswer(g, q.ID) // another watcher may have done it
	}
	withdraw(g, q.ID)
}

// endDialogs ends the questions of a Codex whose dialogs are gone after an event: all of them, or
// the one whose answer was typed last.
func endDialogs(g sys.Guest, e event, agent sys.Process) {
	all := false
	switch e.text("hook_event_name") {
	case "UserPromptSubmit", "Stop", "Interrupt", "SessionEnd":
		all = true
	case "PermissionRequest", "PostToolUse":
	default:
		return
	}
	open, _ := readQuestions(g)
	for _, q := range open {
		if q.Pane != "" && q.AgentPID == agent.PID && (all || wasTyped(g, q)) {
			q.endDialog(g)
		}
	}
}

// typeAnswer types an answer into a dialog of Codex, unless a watcher has just typed one. What
// fails is tried again while the dialog is on the screen.
func typeAnswer(ctx context.Context, g sys.Guest, q question, answer string) {
	f, err := os.OpenFile(filepath.Join(g.Path(questionDir), typedFile), os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return
	}
	defer f.Close()
	if syscall.Flock(int(f.Fd()), syscall.LOCK_EX|syscall.LOCK_NB) != nil {
		return
	}
	if info, err := f.Stat(); err != nil || info.Size() > 0 && time.Since(info.ModTime()) < typeEvery {
		return
	}
	if _, err := f.WriteAt([]byte(q.ID), 0); err != nil { // sets the time
		return
	}
	steps := typing{pressKey(q.Pane, "Escape")}
	switch answer {
	case guestproto.Allow:
		steps = typing{pressKey(q.Pane, "y")}
	case guestproto.Deny:
	default:
		steps = append(steps, pasteText(q.Pane, answer)...)
	}
	_ = steps.run(ctx) // what fails is tried again
}
