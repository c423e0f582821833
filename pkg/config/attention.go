package config

import (
	"cmp"
	"slices"

	"github.com/goccy/go-yaml/ast"
)

// Attention says how the user learns that an agent waits, besides the picker
// and the status line; zero fields are inherited.
type Attention struct {
	Desktop Desktop `yaml:"desktop,omitempty" json:"desktop,omitempty"`
	Command string  `yaml:"command,omitempty" json:"command,omitempty"` // of the user's shell, at each change
}

// Desktop says whether there are notifications of the desktop.
type Desktop string

// The kinds of Desktop.
const (
	DesktopAuto Desktop = "auto" // where there is one, and the user did not come over SSH
	DesktopOn   Desktop = "on"
	DesktopOff  Desktop = "off"
)

// UnmarshalYAML takes the known words.
func (d *Desktop) UnmarshalYAML(n ast.Node) error {
	text, _ := scalar(n)
	*d = Desktop(text)
	if !slices.Contains([]Desktop{DesktopAuto, DesktopOn, DesktopOff}, *d) {
		return at(n, "%q; it is %s, %s or %s", text, DesktopAuto, DesktopOn, DesktopOff)
	}
	return nil
}

func (a Attention) over(base Attention) Attention {
	return Attention{Desktop: cmp.Or(a.Desktop, base.Desktop), Command: cmp.Or(a.Command, base.Command)}
}
