package screen

import (
	"strings"
	"unicode/utf8"

	tea "charm.land/bubbletea/v2"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/termtext"
)

// question is something that the user is asked on the last line of the screen.
type question struct {
	prompt string
	about  []string // lines above it
	text   string   // typed so far
	yesNo  bool     // y or another key answers; do is called for y
	empty  bool     // the answer may be empty
	do     func(m *model, text string) tea.Cmd
}

// maxTyped limits what a user types or pastes, in bytes.
const maxTyped = 4000

func (q *question) add(text string) {
	if !q.yesNo {
		q.text += termtext.Head(text, maxTyped-len(q.text))
	}
}

// answer acts on a key while the user is asked something.
func (m *model) answer(msg tea.KeyPressMsg) tea.Cmd {
	q := m.ask
	switch k := msg.String(); {
	case k == "esc", k == "ctrl+c", q.yesNo && k != "y":
		m.ask = nil
		m.say("cancelled")
	case q.yesNo, k == "enter" && (q.empty || strings.TrimSpace(q.text) != ""):
		m.ask = nil
		return q.do(m, strings.TrimSpace(q.text))
	case k == "backspace":
		_, size := utf8.DecodeLastRuneInString(q.text)
		q.text = q.text[:len(q.text)-size]
	case k == "ctrl+w":
		q.text = q.text[:strings.LastIndexByte(strings.TrimRight(q.text, " "), ' ')+1]
	case k == "ctrl+u":
		q.text = ""
	default:
		q.add(msg.Text)
	}
	return nil
}
