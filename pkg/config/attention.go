package config

import (
	"cmp"
	"fmt"
	"slices"
)

// Attention configures how the user learns that an agent needs attention, besides the
// picker and the status line. Zero fields are inherited.
type Attention struct {
	Desktop Desktop `yaml:"desktop,omitempty" json:"desktop,omitempty"`
	Command string  `yaml:"command,omitempty" json:"command,omitempty"` // run by the user's shell at each change
}

// Desktop configures desktop notifications.
type Desktop string

// The values of Desktop.
const (
	DesktopAuto Desktop = "auto" // if there is a desktop and the user did not log in over SSH
	DesktopOn   Desktop = "on"
	DesktopOff  Desktop = "off"
)

// Set accepts only the known values.
func (d *Desktop) Set(text string) error {
	*d = Desktop(text)
	if !slices.Contains([]Desktop{DesktopAuto, DesktopOn, DesktopOff}, *d) {
		return fmt.Errorf("must be %s, %s or %s, got %q", DesktopAuto, DesktopOn, DesktopOff, text)
	}
	return nil
}

func (a Attention) mergeOver(base Attention) Attention {
	return Attention{Desktop: cmp.Or(a.Desktop, base.Desktop), Command: cmp.Or(a.Command, base.Command)}
}
