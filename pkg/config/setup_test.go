package config

import (
	"reflect"
	"strings"
	"testing"
)

// A repository's own file has a setup in a short and a long form.
func TestSetup(t *testing.T) {
	for text, want := range map[string]Setup{
		"setup: npm ci\n": {Run: "npm ci"},
		"setup:\n  devcontainer: true\n  services: deploy/compose.yaml\n":                    {Devcontainer: true, Services: "deploy/compose.yaml"},
		"setup:\n  run: |\n    npm ci\n    make\n  files: [package-lock.json, web/go.sum]\n": {Run: "npm ci\nmake\n", Files: []RepoPath{"package-lock.json", "web/go.sum"}},
	} {
		p, err := ParseProject("file", []byte(text))
		if err != nil || !reflect.DeepEqual(p.Setup, want) {
			t.Errorf("ParseProject(%q) = %+v, %v, want %+v", text, p.Setup, err, want)
		}
	}
	for text, want := range map[string]string{
		"setup:\n  run: npm ci\n  files: [../secret]\n":                       "must be the path of a file in the repository",
		"setup:\n  run: npm ci\n  files: [/etc/passwd]\n":                     "must be the path of a file in the repository",
		"setup:\n  services: /compose.yaml\n":                                 "must be the path of a file in the repository",
		"setup: [npm, ci]\n":                                                  "setup",
		"setup:\n  run: \"" + strings.Repeat("x", 1000) + "\"\n  script: x\n": "script",
	} {
		if _, err := ParseProject("file", []byte(text)); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("ParseProject(%q) = %v, want an error with %q", text, err, want)
		}
	}
}
