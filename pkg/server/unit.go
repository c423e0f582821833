package server

import (
	_ "embed"
	"encoding/xml"
	"fmt"
	"strings"
	"unicode/utf8"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
)

// The units are filled in without text/template, which would keep the linker from
// leaving out unused methods.
//
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
	return []byte(strings.Replace(systemdUnit, "COMMAND", strings.Join(words, " "), 1)), nil
}

// LaunchdAgent returns an agent for the user's launchd that runs argv and writes to
// log.
func LaunchdAgent(argv []string, log string) ([]byte, error) {
	texts := make([]string, 0, 1+len(argv))
	for _, text := range append([]string{log}, argv...) {
		if !xmlText(text) {
			return nil, fail.New(fail.Usage, "%q cannot be used in a launchd agent", text)
		}
		var b strings.Builder
		if err := xml.EscapeText(&b, []byte(text)); err != nil {
			return nil, err
		}
		texts = append(texts, b.String())
	}
	var args strings.Builder
	for _, arg := range texts[1:] {
		args.WriteString("\n\t\t<string>" + arg + "</string>")
	}
	return []byte(strings.NewReplacer("ARGV", args.String(), "LOG", texts[0]).Replace(launchdAgent)), nil
}

// xmlText reports whether XML can contain a text. EscapeText would replace other characters, so that
// launchd would run another command.
func xmlText(text string) bool {
	return utf8.ValidString(text) && !strings.ContainsFunc(text, func(r rune) bool {
		return r < ' ' && r != '\t' && r != '\n' && r != '\r' || r == 0xFFFE || r == 0xFFFF
	})
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
