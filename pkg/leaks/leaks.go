// Package leaks finds secrets in texts by their form, with the rules of gitleaks.
package leaks

import (
	"fmt"

	"github.com/rs/zerolog"
	"github.com/rs/zerolog/log"
	"github.com/zricethezav/gitleaks/v8/detect"
)

// NewDetector returns a detector that prints nothing of what it finds, and does not obey the comments with
// which a text declares its own secrets harmless. Compiling the rules takes a moment.
func NewDetector() (*detect.Detector, error) {
	log.Logger = zerolog.Nop() // gitleaks prints parts of what it finds to it
	d, err := detect.NewDetectorDefaultConfig()
	if err != nil {
		return nil, fmt.Errorf("read the rules for secrets: %w", err)
	}
	d.IgnoreGitleaksAllow = true
	return d, nil
}
