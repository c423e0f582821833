package guestproto_test

import (
	"bytes"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/google/go-cmp/cmp"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/guestproto"
)

func answers(text string) (all []guestproto.Answer, err error) {
	for a, err := range guestproto.ReadAnswers(strings.NewReader(text)) {
		if err != nil {
			return all, err
		}
		all = append(all, a)
	}
	return all, nil
}

func TestAnswers(t *testing.T) {
	sent := []guestproto.Answer{{ID: "0123456789abcdef", Text: "allow"}, {ID: "fedcba9876543210", Text: "two\nlines, <é> & 日本語"}}
	var stream bytes.Buffer
	for _, a := range sent {
		if err := a.Encode(&stream); err != nil {
			t.Fatal(err)
		}
	}
	got, err := answers(stream.String())
	if diff := cmp.Diff(sent, got); err != nil || diff != "" {
		t.Errorf("answers = %v (-want +got):\n%s", err, diff)
	}
	good := `{"id":"0123456789abcdef","text":"x"}` + "\n"
	for name, bad := range map[string]string{
		"a path":        `{"id":"../../etc/x","text":"x"}`,
		"unknown field": `{"id":"0123456789abcdef","text":"x","run":"rm"}`,
		"not JSON":      "\x1b",
		"endless":       strings.Repeat("x", 40<<10),
	} {
		if got, err := answers(good + bad + "\n" + good); err == nil || len(got) != 1 {
			t.Errorf("%s: read %d answers, %v, want one and an error", name, len(got), err)
		}
	}
}

func FuzzAnswers(f *testing.F) {
	f.Add(`{"id":"0123456789abcdef","text":"allow"}`)
	f.Add(`{"id":"0123456789abcdef","text":"a\u001b[2J\r\n\u202e"}`)
	f.Fuzz(func(t *testing.T, stream string) {
		got, _ := answers(stream)
		for _, a := range got {
			if !guestproto.ValidQuestionID(a.ID) || !utf8.ValidString(a.Text) || utf8.RuneCountInString(a.Text) > guestproto.MaxAnswerText || strings.ContainsAny(a.Text, "\x1b\r\x00\u202e\u009b") {
				t.Fatalf("answer %+v, want an id, and a text of at most %d characters without control characters", a, guestproto.MaxAnswerText)
			}
			var line bytes.Buffer
			if err := a.Encode(&line); err != nil {
				t.Fatal(err)
			}
			if again, err := answers(line.String()); err != nil || len(again) != 1 || again[0] != a {
				t.Fatalf("answer encoded again = %v, %v, want %+v", again, err, a)
			}
		}
	})
}
