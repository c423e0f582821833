package server

import (
	"bytes"
	_ "embed"
	"encoding/xml"
	"fmt"
	"strings"
	"text/template"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
)

//go:embed unit/agent-sessionizer.service.tmpl
var systemdUnit string

//go:embed unit/agent-sessionizer.plist.tmpl
var launchdAgent string

// SystemdUnit returns a unit for the user's systemd that runs argv.
func SystemdUnit(argv []string) ([]byte, error) {
	var words []string
	for _, arg := range argv {
		word, err := systemdQuote(arg)
		if err != nil {
			return nil, err
		}
		words = append(words, word)
	}
	return fill(systemdUnit, struct{ Command string }{strings.Join(words, " ")})
}

// LaunchdAgent returns an agent for the user's launchd that runs argv and writes to
// log.
func LaunchdAgent(argv []string, log string) ([]byte, error) {
	var d struct {
		Argv []string
		Log  string
	}
	for _, text := range append([]string{log}, argv...) {
		var b bytes.Buffer
		if err := xml.EscapeText(&b, []byte(text)); err != nil {
			return nil, err
		}
		d.Argv = append(d.Argv, b.String())
	}
	d.Log, d.Argv = d.Argv[0], d.Argv[1:]
	return fill(launchdAgent, d)
}

func fill(text string, data any) ([]byte, error) {
	t, err := template.New("").Parse(text)
	if err != nil {
		return nil, err
	}
	var b bytes.Buffer
	err = t.Execute(&b, data)
	return b.Bytes(), err
}

// systemdQuote quotes a word of a command line for systemd.syntax(7) and
// systemd.service(5), and escapes specifiers and variables.
func systemdQuote(arg string) (string, error) {
	if strings.ContainsAny(arg, "\x00\r\n") {
		return "", fail.New(fail.Usage, "%q cannot be used in a unit", arg)
	}
	if arg != "" && strings.Trim(arg, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789/._-:=@,+") == "" {
		return arg, nil
	}
	return fmt.Sprintf(`"%s"`, strings.NewReplacer(`\`, `\\`, `"`, `\"`, `%`, `%%`, `$`, `$$`).Replace(arg)), nil
}
