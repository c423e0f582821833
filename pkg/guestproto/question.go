package guestproto

import (
	"bufio"
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"iter"
	"strings"
	"unicode"
	"unicode/utf8"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/lazyregexp"
)

// QuestionKind is what a question is about, and so what its answers mean.
type QuestionKind string

// The kinds of questions. A permission or a plan is answered by Allow or Deny; any other text
// denies it and tells the agent what to do instead. Every other question is answered by a text.
const (
	AskPermission QuestionKind = "permission" // a tool must not run without it
	AskPlan       QuestionKind = "plan"       // the agent's plan must be approved before its work
	AskChoice     QuestionKind = "question"   // with choices; the agent accepts other texts, too
	AskText       QuestionKind = "text"       // without choices
)

// Decides reports whether the question is answered by Allow or Deny.
func (k QuestionKind) Decides() bool { return k == AskPermission || k == AskPlan }

func (k QuestionKind) known() bool {
	return k.Decides() || k == AskChoice || k == AskText
}

// The answers that decide.
const (
	Allow = "allow"
	Deny  = "deny"
)

// Question is what a program in the guest waits for a person to answer.
type Question struct {
	ID      string       `json:"id"` // random
	Kind    QuestionKind `json:"kind"`
	Agent   string       `json:"agent,omitempty"`   // "claude", "codex"; "" for a script
	Tool    string       `json:"tool,omitempty"`    // that asks for permission
	Text    string       `json:"text"`              // may have several lines
	Choices []string     `json:"choices,omitempty"` // texts that may answer it
	Only    bool         `json:"only,omitempty"`    // no other text may
	Parts   int          `json:"parts,omitempty"`   // number of questions in the text, if several; the answer has a line for each
}

// These limit questions and answers, equally on both sides.
const (
	MaxQuestions    = 8        // of a guest at once
	MaxQuestionText = 4000     // characters
	MaxAnswerText   = 4000     // characters
	MaxPromptText   = 16_000   // characters
	MaxTaken        = 32       // answers that an observation reports as taken
	maxAnswer       = 32 << 10 // one line, bytes
	maxChoices      = 10
	maxChoice       = 200 // characters
	maxTool         = 80  // characters
	maxParts        = 10
)

var questionID = lazyregexp.New(`^[0-9a-f]{16}$`)

// ValidQuestionID reports whether id has the form of a question's id.
func ValidQuestionID(id string) bool { return questionID.MatchString(id) }

// cutMark ends a text of which a part is not shown. Without it, a permission for a long command
// would be given for what its user cannot see.
const cutMark = "\n… (the rest is too long to be shown)"

// Sanitized returns a question that is safe to display and within the limits.
func (q Question) Sanitized() Question {
	text := CleanLines(q.Text, MaxQuestionText)
	if utf8.RuneCountInString(q.Text) > MaxQuestionText {
		text = CleanLines(q.Text, MaxQuestionText-utf8.RuneCountInString(cutMark)) + cutMark
	}
	c := Question{
		ID: q.ID, Kind: q.Kind, Agent: shorten(q.Agent, maxName), Tool: shorten(q.Tool, maxTool),
		Text: text, Only: q.Only, Parts: min(max(q.Parts, 0), maxParts),
	}
	for _, choice := range q.Choices[:min(len(q.Choices), maxChoices)] {
		c.Choices = append(c.Choices, shorten(choice, maxChoice))
	}
	return c
}

// Answer is what a person answered to a question.
type Answer struct {
	ID   string `json:"id"` // of the question
	Text string `json:"text"`
}

// Encode writes one line.
func (a Answer) Encode(w io.Writer) error {
	a.Text = CleanLines(a.Text, MaxAnswerText)
	var line bytes.Buffer
	if err := json.NewEncoder(&line).Encode(a); err != nil {
		return fmt.Errorf("send an answer: %w", err)
	}
	if _, err := w.Write(line.Bytes()); err != nil {
		return fmt.Errorf("send an answer: %w", err)
	}
	return nil
}

// ReadAnswers reads answers until r ends. It stops after the first error.
func ReadAnswers(r io.Reader) iter.Seq2[Answer, error] {
	return func(yield func(Answer, error) bool) {
		lines := bufio.NewScanner(r)
		lines.Buffer(make([]byte, 0, 4096), maxAnswer)
		for lines.Scan() {
			a, err := decode[Answer](bytes.NewReader(lines.Bytes()), maxAnswer)
			if err == nil && !ValidQuestionID(a.ID) {
				err = fmt.Errorf("id must be 16 hex digits, got %q", shorten(a.ID, maxName))
			}
			if err != nil {
				yield(Answer{}, fmt.Errorf("answer: %w", err))
				return
			}
			a.Text = CleanLines(a.Text, MaxAnswerText)
			if !yield(a, nil) {
				return
			}
		}
		if err := lines.Err(); err != nil {
			yield(Answer{}, fmt.Errorf("answer: %w", err))
		}
	}
}

// CleanLines works like Clean, but keeps line breaks and at most this many characters.
func CleanLines(s string, most int) string {
	s = strings.ToValidUTF8(s[:min(len(s), most*utf8.UTFMax)], "\ufffd")
	s = strings.NewReplacer("\r\n", "\n", "\t", "    ").Replace(s)
	s = strings.Map(func(r rune) rune {
		if r != '\n' && !unicode.IsPrint(r) {
			return '\ufffd'
		}
		return r
	}, s)
	return head(s, most)
}
