package app

import (
	"errors"
	"testing"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
)

func TestChooseEditor(t *testing.T) {
	for _, c := range []struct {
		name, visual, editor string
		terminal             bool
		there                string
		want                 string
		code                 fail.Code
	}{
		{name: "VISUAL before EDITOR", visual: "code --wait", editor: "vi", want: "code --wait"},
		{name: "EDITOR if VISUAL is blank", visual: " ", editor: "ed", want: "ed"},
		{name: "the installed editor", terminal: true, there: "vi", want: "vi"},
		{name: "the system's default editor first", terminal: true, there: "editor", want: "editor"},
		{name: "no editor", terminal: true, code: fail.Host},
		{name: "no terminal", there: "vi", code: fail.Usage},
	} {
		env := map[string]string{"VISUAL": c.visual, "EDITOR": c.editor}
		got, err := chooseEditor(func(name string) string { return env[name] }, c.terminal, func(name string) (string, error) {
			if name == c.there {
				return "/usr/bin/" + name, nil
			}
			return "", errors.New("not found")
		})
		if got != c.want || (err == nil) != (c.code == 0) || err != nil && (fail.CodeOf(err) != c.code || fail.HintOf(err) == "") {
			t.Errorf("%s: chooseEditor = %q, %v with code %v, hint %q, want %q, code %v", c.name, got, err, fail.CodeOf(err), fail.HintOf(err), c.want, c.code)
		}
	}
}
