package crash

// Mark is the name of a point at which data is written.
type Mark string

// The marks: before and after the store commits a transaction, and before and after a file
// gets its content or its name. Objects and references of git are files, too.
const (
	BeforeCommit Mark = "before-commit"
	AfterCommit  Mark = "after-commit"
	BeforeFile   Mark = "before-file"
	AfterFile    Mark = "after-file"
)
